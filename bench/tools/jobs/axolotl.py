"""Jobs of axolotl: its YAML, with a DeepSpeed configuration or FSDP2."""

from __future__ import annotations

from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import configuration, deepspeed_of, with_deepspeed
from spbench.bench.tools.jobs.transformers_settings import job_of_files
from spbench.bench.tools.jobs.transformers_step import (
    FSDP_1,
    Said,
    TransformersStep,
    bits_of,
    either,
    precision_of,
    said,
    said_in_table,
    torchao_of,
)

_ADAMS = {"adam", "adamw", "paged_adamw", "ao_adamw", "flash_adamw"}
_RING = "ring_attn_func"
#: keys of fsdp_config that say whether weights are freed after forward; older files have them with a prefix
_FREED = ("reshard_after_forward", "sharding_strategy")
_CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def read(files: JobFiles) -> Job | None:
    """A job of axolotl; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    content = configuration(files, ("base_model", "sequence_len"), ("base_model", "micro_batch_size"))
    if content is None:
        return None
    return job_of_files("axolotl", files, content, with_deepspeed(argument_table("axolotl")), _step)


def _step(k: Account) -> TransformersStep:
    if (k.value("eval_batch_size") or 0) <= k.value("micro_batch_size"):
        k.ignore("evaluation holds no more than a step of training", "eval_batch_size")
    return TransformersStep(
        **said_in_table(k),
        **_sharding(k),
        sequence_by=_ring(k),
        accumulation=_accumulation(k),
        precision=_precision(k),
        kept=_kept(k),
        attention=_attention(k),
        liger=_liger(k),
        optimizer=_optimizer(k),
        adapted_experts=_adapted_experts(k),
        quantized=_quantized(k),
        fp8=torchao_of(k, bool(k.value("fp8")), "fp8_enable_fsdp_float8_all_gather", "fp8"),
    )


def _ring(k: Account) -> Said:
    """Whose keys and values a rank has at once: of a run of heads, or of a rank (utils/schemas/config.py)."""
    by_heads = (k.value(_RING) or ("varlen_llama3" if k.value("sample_packing") else "")) == "varlen_llama3"
    if k.value(_RING) not in (None, "varlen_llama3", "batch_ring"):
        k.refuse("another ring than batch_ring", _RING)
    note = "ring-flash-attn, heads_k_stride" if by_heads else "ring-flash-attn"
    return Said("all-gather by heads" if by_heads else "ring of chunks", k.given_of(_RING), note)


def _accumulation(k: Account) -> Said:
    """Micro-batches of a step; an older key says the sequences of all of them."""
    total, micro = k.value("batch_size"), k.value("micro_batch_size")
    if k.has("gradient_accumulation_steps") or not total or micro < 1:
        parts = said(k, "gradient_accumulation_steps")
        if total and total != micro * parts.value:
            steps = f"micro-batch {micro} x accumulation {parts.value}, which count"
            k.approximate(f"{k.spelled('batch_size')} is not {steps}", "batch_size")
        k.ignore("it follows from micro-batches", "batch_size")
        return parts
    return Said(total // micro, ("batch_size",), "of micro-batches")


def _sharding(k: Account) -> dict[str, Any]:
    if not (k.value("fsdp_config") or k.value("fsdp") or k.value("fsdp_version") or _of_fsdp(k)):
        return deepspeed_of(k, "deepspeed", "ddp")
    versions = "fsdp_version", "fsdp_config.fsdp_version"
    if 2 not in map(k.value, versions):
        k.stand_in(*FSDP_1, *k.given_of(*versions))
    k.took("FSDP 2", *k.given_of(*versions))
    k.ignore("a unit of FSDP for each layer", "fsdp", "fsdp_config")
    names = [f"fsdp_config.{prefix}{each}" for each in _FREED for prefix in ("", "fsdp_")]
    kept = {False, "SHARD_GRAD_OP"} & {k.value(name) for name in names}
    on_host = "fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"
    return {
        "sharding": Said("fsdp, kept" if kept else "fsdp", k.given_of(*names)),
        "host": either(k, dict.fromkeys(on_host, "all"), ""),
    }


def _of_fsdp(k: Account) -> bool:
    return any(name.startswith("fsdp_config.") for name in k.given)


def _precision(k: Account) -> Said:
    names = ("bf16", "bfloat16"), ("fp16", "float16")
    return precision_of(k, *([name for name in each if k.value(name)] for each in names))


def _kept(k: Account) -> Said:
    value, names = k.value("activation_offloading"), k.given_of("activation_offloading")
    offload = value or k.value("gradient_checkpointing") in ("offload", "offload_disk")
    return Said("host" if offload else "device", names)


def _attention(k: Account) -> Said:
    """The implementation of attention, also by the switch of an older file."""
    older = k.table.content["older_attention"]
    if k.value("attn_implementation") is not None and k.has("attn_implementation"):
        k.ignore("attn_implementation says it", *older)
        return said(k, "attn_implementation")
    k.ignore("it is off", *(name for name in k.given_of(*older) if not k.value(name)))
    on = [name for name in older if k.value(name)]
    return Said(older[on[0]] if on else k.value("attn_implementation") or "sdpa", on[:1])


def _liger(k: Account) -> Said:
    kernels = k.table.content["liger"]
    words, given = [kernels[name] for name in kernels if k.value(name)], k.given_of(*kernels)
    plugins = k.value("plugins") or []
    if _CUT in plugins:
        words.append("loss")
        because = "Liger's tiles of head and loss stand for it: neither keeps logits"
        k.stand_in("Cut Cross-Entropy", "time and memory", because, "plugins")
        return Said(" ".join(words), (*given, "plugins"))
    k.ignore("what it loads is switched by keys of its own", "plugins")
    return Said(" ".join(words), given)


def _optimizer(k: Account) -> Said:
    """Adam, in how many bits; another's name."""
    name = str(k.value("optimizer") or "adamw_torch_fused")
    plain, _, bits = name.rpartition("_") if name.endswith("bit") else (name, "", "")
    kind = plain.removesuffix("_torch").removesuffix("_bnb").removesuffix("_torch_fused")
    if name.startswith("paged"):
        because = "moments that wait on the host where the device is full are counted there"
        k.stand_in("paged moments", "memory", because, "optimizer")
    if kind not in _ADAMS:
        return Said(name, k.given_of("optimizer"))
    return Said(f"adam {bits[0]} bits" if bits in ("4bit", "8bit") else "adam", k.given_of("optimizer"))


def _adapted_experts(k: Account) -> Said:
    """Whether each routed expert has adapters, which peft multiplies out with its weights."""
    if k.value(name := "lora_target_parameters"):
        because = "without the sums of weights and adapters that peft makes of all experts of a layer at once"
        k.stand_in("adapters of tensors of many experts", "time and memory", because, name)
        return Said("each")
    k.ignore("no tensor of experts has adapters", name)
    return Said("frozen")


def _quantized(k: Account) -> Said:
    return bits_of(k, {"load_in_4bit": 4, "gptq": 4, "load_in_8bit": 8})
