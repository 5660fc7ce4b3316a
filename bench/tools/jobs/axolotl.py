"""Jobs of axolotl: its YAML, with a DeepSpeed configuration or FSDP2."""

from __future__ import annotations

from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import (
    configuration,
    deepspeed_of,
    given_of,
    with_deepspeed,
)
from spbench.bench.tools.jobs.transformers_settings import job_of_files
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, said

_EIGHT_BITS = {"adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "ao_adamw_8bit"}
_LIGER = {
    "liger_rms_norm": "norm",
    "liger_glu_activation": "swiglu",
    "liger_fused_linear_cross_entropy": "loss",
}
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
    return TransformersStep(
        model=said(k, "base_model"),
        length=said(k, "sequence_len"),
        gpus=said(k, "world_size"),
        **_sharding(k),
        sequence=said(k, "context_parallel_size", "sequence_parallel_degree"),
        sequence_by=Said("all-gather by heads", note="ring-flash-attn, heads_k_stride"),
        tensor=said(k, "tensor_parallel_size"),
        groups=said(k, "dp_replicate_size"),
        micro_batch=said(k, "micro_batch_size"),
        accumulation=said(k, "gradient_accumulation_steps"),
        precision=_precision(k),
        recompute=said(k, "gradient_checkpointing"),
        reentrant=_reentrant(k),
        kept=_kept(k),
        attention=said(k, "attn_implementation"),
        liger=_liger(k),
        mlp_tiles=said(k, "tiled_mlp"),
        optimizer=_optimizer(k),
        lora=_lora(k),
        quantized=_quantized(k),
        packed=said(k, "sample_packing"),
        compiled=said(k, "torch_compile"),
    )


def _sharding(k: Account) -> dict[str, Any]:
    if not (k.has("fsdp_config") or k.has("fsdp") or k.has("fsdp_version") or _of_fsdp(k)):
        return deepspeed_of(k, "deepspeed", "ddp")
    k.ignore("a unit of FSDP for each layer", "fsdp", "fsdp_version")
    kept = k.value("fsdp_config.reshard_after_forward") is False
    return {
        "sharding": Said("fsdp, kept" if kept else "fsdp", given_of(k, "fsdp_config.reshard_after_forward")),
        "host": Said(
            "all" if k.value("fsdp_config.offload_params") else "", given_of(k, "fsdp_config.offload_params")
        ),
    }


def _of_fsdp(k: Account) -> bool:
    return any(name.startswith("fsdp_config.") for name in k.given)


def _precision(k: Account) -> Said:
    names = given_of(k, "bf16", "fp16", "bfloat16", "float16")
    if k.value("fp16") or k.value("float16"):
        return Said("fp16", names)
    on = k.value("bf16") or k.value("bfloat16")
    return Said("bf16" if on else "fp32", names, "" if names else "neither bf16 nor fp16")


def _reentrant(k: Account) -> Said:
    name = "gradient_checkpointing_kwargs.use_reentrant"
    value = k.value(name)
    return Said(True if value is None else value, given_of(k, name))


def _kept(k: Account) -> Said:
    value, names = k.value("activation_offloading"), given_of(k, "activation_offloading")
    offload = value or k.value("gradient_checkpointing") in ("offload", "offload_disk")
    return Said("host" if offload else "device", names)


def _liger(k: Account) -> Said:
    names = [name for name in _LIGER if k.value(name)]
    words, given = [_LIGER[name] for name in names], given_of(k, *_LIGER)
    plugins = k.value("plugins") or []
    if _CUT in plugins:
        words.append("loss")
        because = "Liger's tiles of head and loss stand for it: neither keeps logits"
        k.stand_in("Cut Cross-Entropy", "time and memory", because, "plugins")
        return Said(" ".join(words), given)
    k.ignore("what it loads is switched by keys of its own", "plugins")
    return Said(" ".join(words), given)


def _optimizer(k: Account) -> Said:
    name = str(k.value("optimizer"))
    kind = "adam 8 bits" if name in _EIGHT_BITS else "adam" if name.startswith("adamw_") else name
    return Said(kind, given_of(k, "optimizer"))


def _lora(k: Account) -> Said:
    names = given_of(k, "adapter", "lora_r")
    return Said((k.value("lora_r") or 8) if k.value("adapter") in ("lora", "qlora") else 0, names)


def _quantized(k: Account) -> Said:
    bits = 4 if k.value("load_in_4bit") else 8 if k.value("load_in_8bit") else 0
    return Said(bits, given_of(k, "load_in_4bit", "load_in_8bit"))
