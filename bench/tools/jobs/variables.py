"""The variables of a job's environment that torch, CUDA and NCCL read, and which of them are modelled."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from spbench.bench.setting_values import EXPANDABLE_SEGMENTS, checked
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import outcome_groups, table_content
from spbench.bench.tools.jobs.job import Argument, Outcome
from spbench.bench.tools.jobs.shell_syntax import given_flag, shown_word, unknown_in

#: the allocator's variables, of which torch takes the first that is set
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: NAME:VALUE, where a value in brackets may have commas
_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^]]*\]|[^,]*?)\s*(?:,|$)")
#: variables of libraries, which may have an effect though no table has them
_OF_LIBRARIES = re.compile(
    r"(NVTE|CUBLAS(LT)?|CUDNN|CUDA|TORCH|PYTORCH|MEGATRON|TE|NVIDIA_TF32|FLASH_ATTENTION)_\w*"
)
_OPTION = "training.cuda_alloc_conf"


class _Rule(NamedTuple):
    """The outcome of variables whose name matches ``pattern`` and that have the ``value``; "": any value."""

    pattern: str
    value: str
    outcome: Outcome
    detail: str


@cache
def _rules(of_allocator: bool) -> Sequence[_Rule]:
    """The rules of variables.yaml in the file's order; rules for one value of a variable come first."""
    content = table_content("variables")
    rules = [
        _Rule(pattern, value, outcome, detail)
        for words, outcome, detail in outcome_groups(content["allocator"] if of_allocator else content)
        for pattern, _, value in (word.partition("=") for word in words.split())
    ]
    return sorted(rules, key=lambda rule: not rule.value)


def _outcome_of(name: str, value: str, of_allocator: bool) -> tuple[Outcome, str] | None:
    """The outcome and detail of a variable by variables.yaml; None if the file does not name the variable."""
    for rule in _rules(of_allocator):
        if rule.value in ("", value) and re.fullmatch(rule.pattern, name):
            return rule.outcome, rule.detail
    return None


def variables(account: Account) -> Iterator[Argument]:
    """Every variable with its outcome. Adds the setting of the allocator, after all other settings exist."""
    for name, value in account.environment.items():
        if name in ALLOCATOR:
            yield from _allocator(account, name, value)
            continue
        outcome: tuple[Outcome, str] | None
        if name in account.made_of:
            outcome = "mapped", "; ".join(account.made_of[name])
        elif name in account.idle:
            outcome = "no effect", account.idle[name]
        else:
            outcome = _outcome_of(name, value, False)
        if outcome is None and _OF_LIBRARIES.fullmatch(name):
            outcome = "unknown", " in the environment"
        yield Argument(name, shown_word(value), *(outcome or ("no effect", "a variable of the script's own")))


def _allocator(account: Account, name: str, value: str) -> Iterator[Argument]:
    """Each setting in a variable of torch's allocator, with its outcome; only one setting is modelled."""
    if unknown := unknown_in(value):
        account.problems.append(f"{name}: {unknown[0]} is not set in the script; {given_flag(unknown[0])}")
        return
    if others := [n for n in ALLOCATOR if n != name and account.environment.get(n, value) != value]:
        account.problems.append(f"{name} and {others[0]} differ; leave one")
    settings = dict(_SETTING.findall(value))
    expandable = settings.get("expandable_segments") == "True"
    for key, text in settings.items():
        spelled, full = f"{key}:{text}", f"{name} {key}"
        if spelled == EXPANDABLE_SEGMENTS or (key == "max_split_size_mb" and not expandable):
            try:
                checked("cuda_alloc_conf", spelled)
            except ValueError as error:
                account.problems.append(f"{name}: {error}")
            if not any(setting.path == _OPTION for setting in account.settings):
                account.add(_OPTION, spelled, f"{name}={shown_word(value)}")
            yield Argument(full, text, "mapped", f"{_OPTION}: {spelled}")
        else:
            no_rule: tuple[Outcome, str] = "unknown", ", a setting of torch's allocator"
            yield Argument(full, text, *(_outcome_of(key, text, True) or no_rule))
    if ",".join(f"{key}:{text}" for key, text in settings.items()) != re.sub(r"\s", "", value).rstrip(","):
        account.problems.append(f"{name}={shown_word(value)} is no list of NAME:VALUE, each given once")
