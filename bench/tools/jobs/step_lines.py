"""The lines of the section ``step`` of programs' tables: what a job says of each field of its step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import Adapted
from spbench.bench.tools.jobs.argument_tables import OF_DEEPSPEED, table_content
from spbench.bench.tools.jobs.rules import Functions, Rule, Said, follow, holds, said, said_of
from spbench.impls import LATENT, PROJECTIONS


def step_of(account: Account, own: Functions | None = None) -> SimpleNamespace:
    """What a job says of its step, by the section ``step`` of its program's table: fields, each with a line
    (:func:`said_of`, and the words of :data:`_FUNCTIONS`), or several such sections. One with a condition
    ``if`` counts where that holds, and its section ``else`` where not; its ``rules`` are followed first.
    Conditions of later fields have the value of a field as ``$FIELD``, and ``$FIELD.key`` the key that said
    it; ``facts`` are lines that are no fields. ``own``: functions of the program's own words.

    Returns:
        An attribute for each of transformers.yaml's ``fields``, of which those that the job leaves out have
        the value and the note there: :class:`Said`, and ``adapted`` as :class:`Adapted`.
    """
    content = account.table.content["step"]
    defaults = table_content("transformers")["fields"].items()
    fields: dict[str, Any] = {name: Said(line["value"], (), line.get("note", "")) for name, line in defaults}
    fields["adapted"] = Adapted()
    known = {*fields}
    functions = {**_FUNCTIONS, **(own or {})}
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
    """The field that a line sets, or all the fields that its function sets."""
    if name == "adapted":
        return {name: Adapted(**{each: said_of(account, own, functions) for each, own in line.items()})}
    value = said_of(account, line, functions)
    if isinstance(value, dict):
        return value
    account.facts |= {name: value.value, f"{name}.key": (*value.names, "")[0]}
    return {name: value}


def either(account: Account, words: Mapping[str, Any], otherwise: Any = None) -> Said:
    """The word of the first key that is given and true; all given keys count as its source."""
    given = account.given_of(*words)
    value = next((words[name] for name in given if account.value(name)), otherwise)
    return Said(value, given)


def named_modules(account: Account, name: str) -> Said:
    """The names of modules that an option has: a pattern has signs that names have not."""
    value = account.value(name)
    names = value.split() if isinstance(value, str) and re.fullmatch(r"[\w. -]+", value) else value
    return Said(names, account.given_of(name))


def _names(account: Account, line: Rule) -> Said:
    """``names``: the names of a key, with a comma between them."""
    names = map(str.strip, (account.value(line["names"]) or "").split(","))
    return Said([*filter(None, names)], account.given_of(line["names"]))


def _words_of(account: Account, line: Rule) -> Said:
    """``words_of``: the words whose conditions hold."""
    words = [word for condition, word in line["words_of"].items() if holds(account, condition)]
    return Said(" ".join(words), account.given_of(*line["from"].split()))


def _torchao(account: Account, line: Rule) -> Said:
    """``torchao``: the condition on which accelerate switches torchao's matmuls in eight bits on;
    ``gathered``: the key that has weights gathered in them."""
    is_on, gathered = holds(account, line["torchao"]), line["gathered"]
    if is_on and account.value(gathered):
        account.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    account.ignore("weights are gathered in sixteen bits", gathered)
    names = account.given_of(*line["from"].split())
    return Said("tensorwise" if is_on else "", names, "torchao's default recipe")


def _bits(account: Account, line: Rule) -> Said:
    """``bits``: bits of frozen weights, by the keys that ask for them; a problem if two keys ask for
    different numbers."""
    words = line["bits"]
    asked = [name for name in words if account.value(name)]
    if len({words[name] for name in asked}) > 1:
        account.problems.append(f"{_listed(account, asked)}: weights are in one number of bits; leave one")
    return either(account, words, 0)


def _listed(account: Account, names: Sequence[str]) -> str:
    return " and ".join(map(account.spelled, names))


def _precision(account: Account, line: Rule) -> Said:
    """``precision``: keys that ask for bf16 and for fp16; a problem where some ask for another.
    ``otherwise``: a line that says it where none is true; ``from``: the keys that are its source then."""
    asked = {kind: [*filter(account.value, names.split())] for kind, names in line["precision"].items()}
    precision = precision_of(account, asked["bf16"], asked["fp16"])
    if "otherwise" not in line:
        return precision
    names = account.given_of(*line["from"].split())
    return Said(precision.value if precision.names else said_of(account, line["otherwise"]).value, names)


def precision_of(account: Account, bf16: Sequence[str], fp16: Sequence[str]) -> Said:
    """The precision of a job, by the keys that ask for one; a problem where some ask for another."""
    names = (*bf16, *fp16)
    if bf16 and fp16:
        account.problems.append(f"{_listed(account, names)}: bf16 and fp16 are both asked for; leave one")
    value = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    return Said(value, names, "" if names else "neither bf16 nor fp16")


def _product(account: Account, line: Rule) -> Said:
    """``product``: keys whose values are multiplied, of which a later one that is null counts 1; null where
    the first is no positive number. ``from``: the keys that are the source, in place of these."""
    first, *others = line["product"].split()
    value = account.value(first)
    known = isinstance(value, int) and value > 0
    product = math.prod([value, *(account.value(name) or 1 for name in others)]) if known else None
    return Said(product, account.given_of(*line.get("from", line["product"]).split()), line.get("note", ""))


def _accumulation(account: Account, line: Rule) -> Said:
    """``accumulation``: the key with the number of a step's micro-batches. An older key, ``of_all``, has the
    sequences of all of them; divided by ``of_each``, those of one, it is that number."""
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
    """``adapters``: the section that has the fields of adapters, by peft's names, with the names ``ranks`` of
    the rank, which is 8 where the section has none."""
    key = line["adapters"]
    section, source = account.value(key) or {}, account.given_of(key)
    rank = next((section[name] for name in line["ranks"].split() if section.get(name)), 8 if section else 0)
    targets = section.get("target_modules", section.get("lora_modules"))
    parts = (targets, section.get("modules_to_save"), section.get("use_dora"))
    of_experts = "shared" if section.get("share_expert_lora") else "each"
    return {
        "lora": Said(rank, source),
        "adapted": Adapted(*(Said(value, source) for value in parts)),
        "adapted_experts": Said(of_experts if section.get("target_parameters") else "frozen"),
    }


def _matched(account: Account, line: Rule) -> dict[str, Any]:
    """``matched``: patterns of modules, ``every``: all linear ones, ``without``: patterns of others
    (components/_peft/module_matcher.py of NeMo Automodel)."""
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
    """The fields ``sharding``, ``host`` and ``buffer`` by DeepSpeed's configuration: ``deepspeed``, the key
    that names its file; ``otherwise``: the sharding where the job has none."""
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
    """The fields of a configuration that the program brings along, by the name of its file."""
    name = account.value(key)
    if not name:
        return {"sharding": Said(otherwise)}
    stem = PurePosixPath(name).stem if isinstance(name, str) else ""
    brought_along = table_content("transformers")["brought_along"]
    if stem not in brought_along:
        account.problems.append(f"{account.spelled(key)}: give this configuration of DeepSpeed beside")
        return {"sharding": Said("zero3", (key,))}
    brought = brought_along[stem]
    sharding = Said(f"zero{brought['stage']}", (key,))
    return {"sharding": sharding, "host": Said(brought.get("host", ""), (key,))}


def zero_of(account: Account, prefix: str, beside: str = "") -> dict[str, Any]:
    """The fields ``sharding``, ``host`` and ``buffer`` of a step from DeepSpeed's configuration.

    Args:
        prefix: with which DeepSpeed's keys begin in the program's table.
        beside: with which accelerate's keys begin, which count before DeepSpeed's; "": there are none.
    """
    zero = f"{prefix}zero_optimization."
    stage, name = account.chosen(*[f"{beside}zero_stage"] * bool(beside), f"{zero}stage")
    buckets = [f"{zero}{each}_bucket_size" for each in ("reduce", "allgather")]
    overlap = f"{zero}overlap_comm"
    if stage not in (1, 2, 3):
        missing = "DeepSpeed's own data parallelism, without ZeRO" if stage == 0 else "a stage of ZeRO"
        account.refuse(missing, name)
        return {"sharding": Said("zero3", (name,))}
    size = account.value(buckets[0])
    if stage < 3 and size != "auto":
        gib = size * 2 * (2 if account.value(overlap) is True else 1) / 2**30
        held = f"DeepSpeed's buckets of reduce_bucket_size, {gib:.2f} GiB more, are not held"
        account.approximate(held, *buckets, overlap)
    if stage == 3 and account.value(overlap) is False:
        because = "messages are hidden behind computation, where theirs are waited for"
        account.stand_in("messages beside which nothing is computed", "time", because, overlap)
    fetched = [f"{zero}stage3_{each}" for each in ("prefetch_bucket_size", "max_live_parameters")]
    idle = f"of another stage of ZeRO than {stage}, or as large as the job makes them"
    account.ignore(idle, *fetched, *buckets)
    account.ignore("so it is by default" if stage == 3 else "without buckets it does nothing", overlap)
    if stage == 3:
        account.leave("time and memory", "weights of a layer are gathered at once, none ahead", *fetched)
    host, places = _host(account, zero, beside, stage)
    return {
        "sharding": Said(f"zero{stage}", (name,)),
        "host": Said(host, places),
        "buffer": Said(size if stage == 3 else None, buckets[:1]),
    }


def _host(account: Account, zero: str, beside: str, stage: int) -> tuple[str, tuple[str, ...]]:
    """Which states a stage of ZeRO keeps on the host, and the keys that say so."""
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


#: the functions that read lines, by the word that a line has
_FUNCTIONS = {
    "modules": lambda account, line: named_modules(account, line["modules"]),
    "names": _names,
    "words_of": _words_of,
    "torchao": _torchao,
    "bits": _bits,
    "precision": _precision,
    "product": _product,
    "accumulation": _accumulation,
    "adapters": _adapters,
    "matched": _matched,
    "deepspeed": _deepspeed,
}
