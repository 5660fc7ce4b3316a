"""Jobs of verl's supervised tuning: a script that starts its sft_trainer with Hydra's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import launched, overrides_of
from spbench.bench.tools.jobs.program_files import script_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import FSDP_1, Said, TransformersStep, said, said_in_table
from spbench.bench.tools.jobs.variables import variables

_PROGRAMS = re.compile(r"verl\.trainer\.(fsdp_)?sft_trainer(_engine)?")
_PLAIN_LOSS = "VERL_DISABLE_FLASH_ATTN_CE"


def read(files: JobFiles) -> Job | None:
    """A job of verl; None where the script starts no supervised tuning.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    script = script_of(files)
    launch = launched(script, _PROGRAMS, files.environment) if script else None
    if launch is None:
        return None
    problems: list[str] = []
    table = argument_table("verl")
    names = table.content["older"]
    older = any(word.partition("=")[0].lstrip("+~") in names for word in launch.arguments)
    words = [_of_today(word, names) for word in launch.arguments] if older else launch.arguments
    values = dict(overrides_of(words, table, problems))
    if older:
        values = {**table.content["older_defaults"], **values}
    k = key_account(table, values.items(), overrides=files.environment)
    k.environment = launch.environment
    k.problems += problems
    step = _step(k, launch.gpus)
    if older:
        k.remarks.append("keys of verl's older fsdp_sft_trainer are read by their names of today")
        step = replace(step, deferred=Said(""), cross_entropy=Said("plain"))
    set_step(k, step, files)
    if launch.not_said and files.gpus is None and launch.gpus is None:
        k.problems.append(launch.not_said)
    return k.job("verl", files, [*k.arguments(), *variables(k)])


def _of_today(word: str, names: Mapping[str, str]) -> str:
    """An override under the name that its key has today; ``names``: by older ones."""
    name, equals, value = word.partition("=")
    return f"{names.get(name.lstrip('+~'), name)}{equals}{value}"


def _loss(k: Account) -> Said:
    """The loss (utils/torch_functional.py): flash-attn's works in the logits, beside which is what a
    temperature divided; without it, the log-softmax is torch's, row by row."""
    if k.environment.get(_PLAIN_LOSS, "0") == "1":
        return Said("as_given", (_PLAIN_LOSS,))
    return Said("compiled", (), "flash-attn's; logits twice in half precision")


def _step(k: Account, gpus: int | None) -> TransformersStep:
    use, dynamic = "model.use_remove_padding", "data.use_dynamic_bsz"
    fields = _automodel(k) if k.value("engine") == "automodel" else _fsdp(k)
    parts = fields["sequence"].value
    length, rows = said(k, "data.max_length"), said(k, "data.micro_batch_size_per_gpu")
    if k.value(dynamic):
        tokens = k.value("data.max_token_len_per_gpu") * (parts if isinstance(parts, int) else 1)
        names = k.given_of("data.max_token_len_per_gpu")
        length, rows = (
            Said(tokens, names, "a micro-batch of use_dynamic_bsz"),
            Said(1, (), "one row of packed samples"),
        )
        k.ignore("use_dynamic_bsz fills rows up to max_token_len_per_gpu", "data.max_length")
        k.ignore("use_dynamic_bsz fills rows up to max_token_len_per_gpu", "data.micro_batch_size_per_gpu")
    return TransformersStep(
        **said_in_table(k, "all"),
        length=length,
        gpus=Said(gpus),
        micro_batch=rows,
        batch=_total(k) if k.value(dynamic) else said(k, "data.train_batch_size"),
        packed=Said(bool(k.value(use)), k.given_of(use, dynamic)),
        cross_entropy=_loss(k),
        **fields,
    )


def _fsdp(k: Account) -> dict[str, Any]:
    """What its own engine says of a step."""
    engine, strategy = "engine", "engine.strategy"
    if k.value(engine) not in ("fsdp", "fsdp2"):
        k.refuse("another engine than FSDP and Automodel", engine)
    if "fsdp2" not in (k.value(engine), k.value(strategy)):
        k.stand_in(*FSDP_1, *k.given_of(engine, strategy))
    k.took("FSDP", engine, strategy, "optim")
    _moved(k)
    size = k.value("engine.fsdp_size")
    if size not in (-1, None):
        because = "weights are sharded over all ranks"
        k.stand_in(
            "weights that are sharded over a part of the replicas", "memory", because, "engine.fsdp_size"
        )
    return said_in_table(k, "fsdp")


def _moved(k: Account) -> None:
    if k.value("engine.param_offload") or k.value("engine.optimizer_offload"):
        because = "what waits on the host between its uses is on the device"
        moved = "engine.param_offload", "engine.optimizer_offload"
        k.stand_in("weights or optimizer that are moved between phases", "time and memory", because, *moved)


def _automodel(k: Account) -> dict[str, Any]:
    """What its engine of NeMo Automodel says of a step (verl/trainer/config/engine/automodel.yaml)."""
    k.took("NeMo Automodel under FSDP2", "engine", "optim", "engine.distributed_strategy", "engine.strategy")
    if k.value("engine.distributed_strategy") != "fsdp2":
        k.refuse("another distribution than FSDP2", "engine.distributed_strategy")
    _moved(k)
    spread = k.value("engine.ep_size") > 1
    kept = "engine.moe_config.reshard_after_forward"
    k.ignore("experts are not spread over ranks", kept)
    freed = k.value(kept) if spread else k.value("engine.pp_size") == 1
    optimizer = str(k.value("optim.optimizer"))
    k.took("the kernel of the optimizer", *k.given_of("optim.optimizer_impl"))
    return {
        **said_in_table(k, "automodel"),
        "sharding": Said("fsdp" if freed else "fsdp, kept", k.given_of(kept) if spread else ()),
        "optimizer": Said("adam" if "Adam" in optimizer else optimizer, k.given_of("optim.optimizer")),
    }


def _total(k: Account) -> Said:
    """One micro-batch a step: samples make an unknown number of rows of so many tokens."""
    k.ignore(
        "how many rows the samples of a step make is not known; one row a rank is taken",
        "data.train_batch_size",
    )
    k.remarks.append(
        "a step is one row a rank: how many rows the samples of a step make depends on their lengths"
    )
    return Said(None)
