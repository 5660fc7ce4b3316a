"""Jobs of LLaMA-Factory: its YAML, of version 0 (the Trainer's arguments) or 1 (its own trainer)."""

from __future__ import annotations

from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import configuration, deepspeed_of, with_deepspeed, with_trainer
from spbench.bench.tools.jobs.transformers_settings import job_of_files
from spbench.bench.tools.jobs.transformers_step import (
    Adapted,
    Said,
    TransformersStep,
    precision_of,
    said,
    said_in_table,
    torchao_of,
)

_OLD, _NEW = ("stage", "finetuning_type"), ("model", "cutoff_len")


def read(files: JobFiles) -> Job | None:
    """A job of LLaMA-Factory; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    if (content := configuration(files, _OLD, ("stage", "template", "cutoff_len"))) is not None:
        table, step = with_trainer(with_deepspeed(argument_table("llama_factory", "0"))), _step
    elif (content := configuration(files, _NEW, ("model", "dist_config"))) is not None:
        table, step = argument_table("llama_factory", "1"), _newer_step
    else:
        return None
    return job_of_files("llama_factory", files, content, table, step)


def _step(k: Account) -> TransformersStep:
    """A job of version 0."""
    if k.value("stage") not in ("sft", "pt"):
        k.refuse("reinforcement learning, or preferences", "stage")
    k.ignore("one loss of the next token", "stage")
    if k.value("finetuning_type") not in ("full", "lora"):
        k.refuse("weights of which some are trained", "finetuning_type")
    k.took("which weights are trained", "finetuning_type")
    again = not k.value("disable_gradient_checkpointing")
    return TransformersStep(
        **said_in_table(k, "0"),
        **deepspeed_of(k, "deepspeed", "ddp"),
        precision=precision_of(
            k, [name for name in ("bf16", "pure_bf16") if k.value(name)], ["fp16"] * bool(k.value("fp16"))
        ),
        recompute=Said(
            again, k.given_of("disable_gradient_checkpointing", "gradient_checkpointing"), "is on"
        ),
        adapted=Adapted(_names(k, "lora_target"), _names(k, "additional_target"), said(k, "use_dora")),
        fp8=_fp8(k),
    )


def _names(k: Account, name: str) -> Said:
    """Names of modules, with a comma between them."""
    names = map(str.strip, (k.value(name) or "").split(","))
    return Said([*filter(None, names)], k.given_of(name))


def _fp8(k: Account) -> Said:
    """torchao's matmuls in eight bits, of version 0."""
    backend, gathered = "fp8_backend", "fp8_enable_fsdp_float8_all_gather"
    on = bool(k.value("fp8") or k.value(gathered))
    if on and k.value(backend) not in ("auto", "torchao"):
        k.refuse("matmuls in eight bits by another library than torchao", backend)
    k.ignore("no matmul is in eight bits", backend)
    return torchao_of(k, on, gathered, "fp8", backend, gathered)


def _newer_step(k: Account) -> TransformersStep:
    """A job of version 1."""
    return TransformersStep(**{**said_in_table(k, "1"), **_distribution(k)}, lora=_newer_lora(k))


def _newer_lora(k: Account) -> Said:
    """Adapters of version 1, which it has by default of rank 8."""
    name, rank = "peft_config.name", "peft_config.r"
    if k.value(name) == "lora":
        return Said(k.value(rank), k.given_of(name, rank))
    if k.value(name) is not None:
        because = "all weights are trained, with their gradients and optimizer"
        k.stand_in("weights of which some are trained", "time and memory", because, name)
    k.ignore("all weights are trained", rank)
    return Said(0, k.given_of(name))


def _distribution(k: Account) -> dict[str, Any]:
    """How version 1 shards weights."""
    name, file, way = (f"dist_config.{each}" for each in ("name", "config_file", "ep_dispatcher"))
    value = k.value(name)
    if value == "deepspeed":
        k.took("DeepSpeed", name)
        return deepspeed_of(k, file)
    if value == "fsdpturbo":
        k.stand_in("FSDPTurbo", "time and memory", "torch's fully_shard stands for it", name)
    elif value != "fsdp2":
        k.refuse("another distribution than FSDP2, DeepSpeed and FSDPTurbo", name)
    k.ignore("of DeepSpeed", file)
    k.leave("time", "tokens reach experts by all-to-alls", way)
    return {"sharding": Said("fsdp", k.given_of(name))}
