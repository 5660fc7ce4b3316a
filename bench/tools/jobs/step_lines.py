"""The fields of a job's training step, such as its length, by the section ``step`` of the program's table.

A line of that section says which keys give a field; the :mod:`rules` have most lines, this module the others.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import Adapted
from spbench.bench.tools.jobs.argument_tables import OF_DEEPSPEED, table_content
from spbench.bench.tools.jobs.rules import Functions, Rule, Said, follow, holds, said, said_of
from spbench.impls import LATENT, PROJECTIONS


def step_of(account: Account, own: Functions | None = None) -> SimpleNamespace:
    """The fields of a job's step, by the section ``step`` of its program's table: a mapping of each field to
    a line (:func:`said_of`, with the words of :data:`FUNCTIONS`), or a list of such mappings. A mapping with
    a condition ``if`` counts if the condition holds, else its ``else`` does; its ``rules`` are followed
    first. ``facts`` are lines that are no fields. Conditions of later lines know the value of a field as
    ``$FIELD``, and its key as ``$FIELD.key``. ``own``: functions for the program's own words.

    Returns:
        An attribute for each of transformers.yaml's ``fields``, a :class:`Said` (``adapted``:
        :class:`Adapted`); a field that the job leaves out has the value and the note of transformers.yaml.
    """
    content = account.table.content["step"]
    defaults = table_content("transformers")["fields"].items()
    fields: dict[str, Any] = {name: Said(line["value"], (), line.get("note", "")) for name, line in defaults}
    fields["adapted"] = Adapted()
    known = {*fields}
    functions = {**FUNCTIONS, **(own or {})}
    for section in content if isinstance(content, list) else [content]:
        if not holds(account, section.get("if", "")):
            section = section.get("else", {})
        for name, line in section.get("facts", {}).items():
            _fields(account, name, line, functions)
        follow(account, section.get("rules", ()))
        for name, line in section.items():
            if name not in ("if", "else", "rules", "facts"):
                fields |= _fields(account, name, line, functions)
    assert known == {*fields}, fields.keys() - known
    return SimpleNamespace(**fields)


def _fields(account: Account, name: str, line: Any, functions: Functions) -> dict[str, Any]:
    """The field that a line sets, as {name: value}, or all the fields that the line's function sets."""
    if name == "adapted":
        return {name: Adapted(**{each: said_of(account, own, functions) for each, own in line.items()})}
    value = said_of(account, line, functions)
    if isinstance(value, dict):
        return value
    account.facts |= {name: value.value, f"{name}.key": (*value.names, "")[0]}
    return {name: value}


def named_modules(account: Account, name: str) -> Said:
    """The names of modules in the value of an option, as a list; a regular expression stays one text."""
    value = account.value(name)
    names = value.split() if isinstance(value, str) and re.fullmatch(r"[\w. -]+", value) else value
    return Said(names, account.given_of(name))


def _names(account: Account, line: Rule) -> Said:
    """The line ``names``: the list of names in a key's value, which has commas between them."""
    names = map(str.strip, (account.value(line["names"]) or "").split(","))
    return Said([*filter(None, names)], account.given_of(line["names"]))


def _words_of(account: Account, line: Rule) -> Said:
    """The line ``words_of``: the words whose conditions hold, with spaces between them."""
    words = [word for condition, word in line["words_of"].items() if holds(account, condition)]
    return Said(" ".join(words), account.given_of(*line["from"].split()))


def _torchao(account: Account, line: Rule) -> Said:
    """The line ``torchao``: torchao's recipe of matmuls in eight bits if the condition ``torchao`` holds,
    else ""; ``gathered``: the key by which weights would be gathered in eight bits."""
    is_on, gathered = holds(account, line["torchao"]), line["gathered"]
    if is_on and account.value(gathered):
        account.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    account.ignore("weights are gathered in sixteen bits", gathered)
    names = account.given_of(*line["from"].split())
    return Said("tensorwise" if is_on else "", names, "torchao's default recipe")


def _bits(account: Account, line: Rule) -> Said:
    """The line ``bits``: the bits of a frozen weight, by the keys that ask for them, else 0; a problem if two
    keys ask for different numbers."""
    words = line["bits"]
    asked = [*filter(account.value, words)]
    if len({words[name] for name in asked}) > 1:
        account.problems.append(f"{_listed(account, asked)}: weights are in one number of bits; leave one")
    return Said(words[asked[0]] if asked else 0, account.given_of(*words))


def _listed(account: Account, names: Sequence[str]) -> str:
    return " and ".join(map(account.spelled, names))


def _precision(account: Account, line: Rule) -> Said:
    """The line ``precision``: the precision by the keys that ask for bf16 and for fp16; a problem if both
    kinds are true. ``otherwise``: the line that counts if no key is true; ``from``: the keys as source."""
    asked = {kind: [*filter(account.value, names.split())] for kind, names in line["precision"].items()}
    precision = precision_of(account, asked["bf16"], asked["fp16"])
    if "otherwise" not in line:
        return precision
    names = account.given_of(*line["from"].split())
    return Said(precision.value if precision.names else said_of(account, line["otherwise"]).value, names)


def precision_of(account: Account, bf16: Sequence[str], fp16: Sequence[str]) -> Said:
    """The precision of a job, by the keys that ask for bf16 and for fp16, else fp32; a problem if both do."""
    names = (*bf16, *fp16)
    if bf16 and fp16:
        account.problems.append(f"{_listed(account, names)}: bf16 and fp16 are both asked for; leave one")
    value = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    return Said(value, names, "" if names else "neither bf16 nor fp16")


#: the words of lines that compute a value from the numbers of several keys, with what they compute; None: no
#: whole number
_COMPUTED: Mapping[str, Callable[..., int | None]] = {
    "product": lambda first, *others: first * math.prod(others) if first > 0 else None,
    "quotient": lambda first, *others: (
        first // by if (by := math.prod(others)) > 0 and first % by == 0 else None
    ),
    "sum": lambda *numbers: sum(numbers),
}


def _computed(word: str, account: Account, line: Rule) -> Said:
    """A line of :data:`_COMPUTED`, null if a key has no whole number; in a product a null or 0 of a key after
    the first counts as 1. ``from``: the keys of the source, if they are others."""
    first, *others = map(account.known, line[word].split())
    numbers = [first, *((each or 1) if word == "product" else each for each in others)]
    value = _COMPUTED[word](*numbers) if all(isinstance(each, int) for each in numbers) else None
    return Said(value, account.given_of(*line.get("from", line[word]).split()), line.get("note", ""))


def _accumulation(account: Account, line: Rule) -> Said:
    """The line ``accumulation``: a step's number of micro-batches, by the key ``accumulation``, else by an
    older key, ``of_all``, the sequences of a step, divided by ``of_each``, those of a micro-batch."""
    name, of_all = line["accumulation"], line["of_all"]
    total, micro = account.value(of_all), account.value(line["of_each"])
    if not account.has(name) and total and micro >= 1:
        return Said(total // micro, (of_all,), "of micro-batches")
    parts = said(account, name)
    if total and total != micro * parts.value:
        steps = f"micro-batch {micro} x accumulation {parts.value}, which count"
        account.approximate(f"{account.spelled(of_all)} is not {steps}", of_all)
    account.ignore("it follows from micro-batches", of_all)
    return parts


def _adapters(account: Account, line: Rule) -> dict[str, Any]:
    """The line ``adapters``: the fields ``lora``, ``adapted`` and ``adapted_experts`` by a section with
    peft's names; ``ranks``: names of the rank, which is ``rank``, else 8, if the section has none of them."""
    key = line["adapters"]
    section, source = account.value(key) or {}, account.given_of(key)
    rank = next(
        (section[name] for name in line["ranks"].split() if section.get(name)),
        line.get("rank", 8) if section else 0,
    )
    targets = section.get("target_modules", section.get("lora_modules"))
    parts = (targets, section.get("modules_to_save"), section.get("use_dora"))
    of_experts = "shared" if section.get("share_expert_lora") else "each"
    return {
        "lora": Said(rank, source),
        "adapted": Adapted(*(Said(value, source) for value in parts)),
        "adapted_experts": Said(of_experts if section.get("target_parameters") else "frozen"),
    }


def _matched(account: Account, line: Rule) -> dict[str, Any]:
    """The line ``matched``: the fields of adapters by three keys: patterns of modules, ``every``: all linear
    modules, ``without``: patterns of excluded ones (NeMo Automodel's components/_peft/module_matcher.py)."""
    some, every, others = line["matched"], line["every"], line["without"]
    named, without = account.value(some) or [], account.value(others) or []
    named = [named] if isinstance(named, str) else named
    if without:
        names = (*PROJECTIONS, *LATENT)
        named = [each for each in names if not any(fnmatchcase(each, name) for name in without)]
    elif account.value(every):
        named = ["all-linear", "lm_head"]
    experts = any(fnmatchcase("model.layers.0.mlp.experts", name) for name in named)
    targets = Said(named or None, account.given_of(every, some, others))
    return {
        "adapted": Adapted(targets, by_direction=said(account, line["dora"])),
        "adapted_experts": Said("each" if experts else "frozen"),
    }


def _deepspeed(account: Account, line: Rule) -> dict[str, Any]:
    """The line ``deepspeed``: the fields ``sharding``, ``host`` and ``zero_options`` by the configuration of
    DeepSpeed that the key ``deepspeed`` names; ``otherwise``: the sharding of a job without DeepSpeed."""
    key = line["deepspeed"]
    own = [name for name in account.given if name.startswith(OF_DEEPSPEED)]
    if not own:
        return _brought(account, key, line.get("otherwise", "fsdp"))
    account.took("its file is given", key)
    fields = zero_of(account, OF_DEEPSPEED)
    arguments = account.program_arguments
    mapped = [name for name in own if name in arguments and arguments[name].outcome == "mapped"]
    account.ignore("as the program around DeepSpeed says", *mapped)
    return fields


def _brought(account: Account, key: str, otherwise: str) -> dict[str, Said]:
    """The fields ``sharding``, ``host`` and ``zero_options`` by a configuration of DeepSpeed that the program
    brings along; ``key`` has the name of the configuration's file."""
    name = account.value(key)
    if not name:
        return {"sharding": Said(otherwise)}
    stem = PurePosixPath(name).stem if isinstance(name, str) else ""
    brought_along = table_content("transformers")["brought_along"]
    if stem not in brought_along:
        account.problems.append(f"{account.spelled(key)}: give this configuration of DeepSpeed beside")
        return {"sharding": Said("zero3", (key,))}
    brought = brought_along[stem]
    options = {name: Said(value, (key,)) for name, value in brought.get("options", {}).items()}
    return {
        "sharding": Said(f"zero{brought['stage']}", (key,)),
        "host": Said(brought.get("host", ""), (key,)),
        "zero_options": Said(options),
    }


def zero_of(account: Account, prefix: str, beside: str = "") -> dict[str, Any]:
    """The fields ``sharding``, ``host`` and ``zero_options`` of a step from DeepSpeed's configuration.

    Args:
        prefix: the prefix of DeepSpeed's keys in the program's table.
        beside: the prefix of accelerate's keys, which count before DeepSpeed's; "": there are no such keys.
    """
    zero = f"{prefix}zero_optimization."
    stage, name = account.chosen(*[f"{beside}zero_stage"] * bool(beside), f"{zero}stage")
    if stage not in (1, 2, 3):
        missing = "DeepSpeed's own data parallelism, without ZeRO" if stage == 0 else "a stage of ZeRO"
        account.refuse(missing, name)
        return {"sharding": Said("zero3", (name,))}
    shared = table_content("transformers")
    by_stage = [{name: f"{zero}{name}" for name in shared[f"stage{each}"]} for each in (2, 3)]
    of_stage, of_others = by_stage if stage < 3 else by_stage[::-1]
    account.ignore("an all-gather has a whole flat tensor", f"{zero}allgather_bucket_size")
    others = (key for name, key in of_others.items() if name not in of_stage)
    account.ignore("of another stage of ZeRO", *others)
    host, places = _host(account, zero, beside, stage)
    options = {name: Said(account.value(key), account.given_of(key)) for name, key in of_stage.items()}
    return {
        "sharding": Said(f"zero{stage}", (name,)),
        "host": Said(host, places),
        "zero_options": Said(options, account.given_of(*of_stage.values())),
    }


def _host(account: Account, zero: str, beside: str, stage: int) -> tuple[str, tuple[str, ...]]:
    """The states that ZeRO keeps on the host ("all", "optimizer", "params" or ""), and keys that say it."""
    held, names, key = dict[str, bool](), list[str](), ""
    for kind in ("optimizer", "param"):
        accelerates = [f"{beside}offload_{kind}_device"] * bool(beside)
        place, key = account.chosen(*accelerates, f"{zero}offload_{kind}.device")
        if place not in ("cpu", "none", None):
            account.refuse("keeping weights or optimizer on a disk", key)
        held[kind] = place == "cpu"
        names += account.given_of(key)
    if held["param"] and stage < 3:
        account.refuse("weights on the host below ZeRO-3", key)
    both = held["optimizer"] and held["param"]
    return "all" if both else "optimizer" if held["optimizer"] else "params" * held["param"], tuple(names)


_READERS = (
    *(_names, _words_of, _torchao, _bits, _precision, _accumulation, _adapters, _matched, _deepspeed),
)
#: the functions that read lines of a step, by the word by which they know their line
FUNCTIONS: Functions = {
    "modules": lambda account, line: named_modules(account, line["modules"]),
    **{word: partial(_computed, word) for word in _COMPUTED},
    **{reader.__name__.removeprefix("_"): reader for reader in _READERS},
}
