"""The variables of a job's environment: what torch, CUDA and NCCL make of them, and what is modelled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.setting_values import EXPANDABLE_SEGMENTS, checked
from spbench.bench.tools.jobs.account import Account, may_move
from spbench.bench.tools.jobs.job import Argument, Outcome
from spbench.bench.tools.jobs.shell import shown, unknown_in
from spbench.bench.yaml_files import read_yaml

_FILE = Path(__file__).with_suffix(".yaml")
#: of which torch takes the first that is set
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: NAME:VALUE, where a value in brackets may have commas
_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^]]*\]|[^,]*?)\s*(?:,|$)")
#: of libraries: one that is in no table may have an effect
_OF_LIBRARIES = re.compile(
    r"(NVTE|CUBLAS(LT)?|CUDNN|CUDA|TORCH|PYTORCH|MEGATRON|TE|NVIDIA_TF32|FLASH_ATTENTION)_\w*"
)
_OPTION = "training.cuda_alloc_conf"


@dataclass(frozen=True)
class _Rule:
    """What becomes of the names that a pattern matches, of one value alone where there is one."""

    pattern: re.Pattern[str]
    value: str | None
    outcome: Outcome
    detail: str

    def takes(self, name: str, value: str) -> bool:
        return self.pattern.fullmatch(name) is not None and self.value in (None, value)


@cache
def _rules(of_allocator: bool) -> Sequence[_Rule]:
    """Those of one value first, then the others in the order of the table."""
    content = read_yaml(_FILE)
    content, words = (content["allocator"], "settings") if of_allocator else (content, "variables")
    groups: list[tuple[Mapping[str, Any], Outcome, str]] = [
        (group, "no effect", group["reason"]) for group in content["no_effect"]
    ]
    groups += [
        (group, "not modelled", may_move(group["may_move"], group["because"]))
        for group in content["not_modelled"]
    ]
    found = [
        _Rule(re.compile(pattern), value or None, outcome, detail)
        for group, outcome, detail in groups
        for pattern, _, value in (word.partition("=") for word in group[words].split())
    ]
    return sorted(found, key=lambda rule: rule.value is None)


def variables(a: Account, environment: Mapping[str, str]) -> Iterator[Argument]:
    """What became of each variable, once the settings of the job are made; the allocator's are made here."""
    for name, value in environment.items():
        if name in ALLOCATOR:
            yield from _allocator(a, name, value, environment)
        elif name in a.made_of:
            yield Argument(name, shown(value), "mapped", "; ".join(a.made_of[name]))
        elif name in a.idle:
            yield Argument(name, shown(value), "no effect", a.idle[name])
        elif rule := next((rule for rule in _rules(False) if rule.takes(name, value)), None):
            yield Argument(name, shown(value), rule.outcome, rule.detail)
        elif _OF_LIBRARIES.fullmatch(name):
            yield Argument(name, shown(value), "unknown", " in the environment")
        else:
            yield Argument(name, shown(value), "no effect", "a variable of the script's own")


def _allocator(a: Account, name: str, value: str, environment: Mapping[str, str]) -> Iterator[Argument]:
    """Each setting of torch's allocator, of which one at a time is modelled."""
    if unknown := unknown_in(value):
        a.problems.append(f"{name}: {unknown[0]} is not set in the script; set it there")
        return
    if others := [n for n in ALLOCATOR if n != name and environment.get(n, value) != value]:
        a.problems.append(f"{name} and {others[0]} differ; leave one")
    settings = dict(_SETTING.findall(value))
    expandable = settings.get("expandable_segments") == "True"
    for key, text in settings.items():
        spelled, told = f"{key}:{text}", f"{name} {key}"
        if spelled == EXPANDABLE_SEGMENTS or (key == "max_split_size_mb" and not expandable):
            try:
                checked("cuda_alloc_conf", spelled)
            except ValueError as error:
                a.problems.append(f"{name}: {error}")
            if not any(setting.path == _OPTION for setting in a.settings):
                a.add(_OPTION, spelled, f"{name}={shown(value)}")
            yield Argument(told, text, "mapped", f"{_OPTION}: {spelled}")
        elif rule := next((rule for rule in _rules(True) if rule.takes(key, text)), None):
            yield Argument(told, text, rule.outcome, rule.detail)
        else:
            yield Argument(told, text, "unknown", ", a setting of torch's allocator")
    if ",".join(f"{key}:{text}" for key, text in settings.items()) != re.sub(r"\s", "", value).rstrip(","):
        a.problems.append(f"{name}={shown(value)} is no list of NAME:VALUE, each given once")
