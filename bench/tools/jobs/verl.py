"""Jobs of verl's supervised tuning: a script that starts its sft_trainer with Hydra's overrides."""

from __future__ import annotations

import re

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.command_values import overrides_of
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import launched
from spbench.bench.tools.jobs.program_files import given_of, script_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, said
from spbench.bench.tools.jobs.variables import variables

_PROGRAMS = re.compile(r"verl\.trainer\.(fsdp_)?sft_trainer(_engine)?")


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
    k = key_account(table, overrides_of(launch.arguments, table, problems), overrides=files.environment)
    k.environment = launch.environment
    k.problems += problems
    set_step(k, _step(k, launch.gpus), files)
    if launch.not_said and files.gpus is None and launch.gpus is None:
        k.problems.append(launch.not_said)
    return k.job("verl", files, [*k.arguments(), *variables(k)])


def _step(k: Account, gpus: int | None) -> TransformersStep:
    engine, strategy = "engine", "engine.strategy"
    if k.value(engine) not in ("fsdp", "fsdp2"):
        k.refuse("another engine than FSDP", engine)
    k.took("FSDP", engine, strategy)
    on_host = k.value("engine.offload_policy")
    if k.value("engine.param_offload") or k.value("engine.optimizer_offload"):
        because = "what waits on the host between its uses is on the device"
        moved = "engine.param_offload", "engine.optimizer_offload"
        k.stand_in("weights or optimizer that are moved between phases", "time and memory", because, *moved)
    kept = "engine.reshard_after_forward"
    use = "model.use_remove_padding"
    dynamic = "data.use_dynamic_bsz"
    length, rows = said(k, "data.max_length"), said(k, "data.micro_batch_size_per_gpu")
    if k.value(dynamic):
        tokens = k.value("data.max_token_len_per_gpu") * k.value("engine.ulysses_sequence_parallel_size")
        names = given_of(k, "data.max_token_len_per_gpu")
        length, rows = (
            Said(tokens, names, "a micro-batch of use_dynamic_bsz"),
            Said(1, (), "one row of packed samples"),
        )
        k.ignore("use_dynamic_bsz fills rows up to max_token_len_per_gpu", "data.max_length")
        k.ignore("use_dynamic_bsz fills rows up to max_token_len_per_gpu", "data.micro_batch_size_per_gpu")
    total = _total(k) if k.value(dynamic) else said(k, "data.train_batch_size")
    size = k.value("engine.fsdp_size")
    if size not in (-1, None):
        because = "weights are sharded over all ranks"
        k.stand_in(
            "weights that are sharded over a part of the replicas", "memory", because, "engine.fsdp_size"
        )
    return TransformersStep(
        model=said(k, "model.path"),
        length=length,
        gpus=Said(gpus),
        sharding=Said("fsdp, kept" if k.value(kept) is False else "fsdp", given_of(k, kept)),
        host=Said("all" if on_host else "", given_of(k, "engine.offload_policy")),
        sequence=said(k, "engine.ulysses_sequence_parallel_size"),
        micro_batch=rows,
        batch=total,
        precision=Said("bf16", given_of(k, "engine.dtype"), "mixed precision of FSDP"),
        half=Said(
            k.value("engine.model_dtype") not in ("fp32", "float32"), given_of(k, "engine.model_dtype")
        ),
        reduce=Said("fp32", (), "mixed precision of FSDP"),
        recompute=said(k, "model.enable_gradient_checkpointing"),
        kept=Said(
            "host" if k.value("model.enable_activation_offload") else "device",
            given_of(k, "model.enable_activation_offload"),
        ),
        attention=Said("flash_attention_2", (), "as verl loads models"),
        liger=Said("norm swiglu" if k.value("model.use_liger") else "", given_of(k, "model.use_liger")),
        packed=Said(bool(k.value(use)), given_of(k, use, dynamic)),
        lora=said(k, "model.lora_rank"),
    )


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
