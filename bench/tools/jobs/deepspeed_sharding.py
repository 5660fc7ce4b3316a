"""How a DeepSpeed or accelerate job shards weights, gradients and optimizer, and which weights it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.program_files import zero_of
from spbench.bench.tools.jobs.transformers_step import FSDP_1, Adapted, Said, bits_of, either

_ACCELERATE, _FSDP = "accelerate.deepspeed_config.", "accelerate.fsdp_config.fsdp_"
_TYPE = "seq_parallel_communication_data_type"


def sharding_of(
    k: Account, contents: Mapping[str, Mapping[str, Any]], precision: str, *, cut: bool
) -> dict[str, Any]:
    """The fields of a step that say how it shards: FSDP where accelerate's file asks for it, else a stage of
    ZeRO.

    Args:
        contents: of the files, by what they are.
        cut: ranks share a sequence.
    """
    name, beside = "accelerate.distributed_type", contents.get("accelerate", {})
    kind = k.value(name)
    k.took("which files count", name)
    if kind is None:
        of_deepspeed = "deepspeed" in contents or "deepspeed_config" in beside
        kind = "FSDP" if "fsdp_config" in beside else "DEEPSPEED" if of_deepspeed else "NO"
    if kind != "DEEPSPEED":
        if "deepspeed" in contents:
            k.problems.append(f"{name} is {kind} beside a configuration of DeepSpeed")
        k.ignore("of DeepSpeed", *(n for n in k.given if "offload_" in n and "fsdp" not in n))
        return _fsdp_of(k) if kind == "FSDP" else {"sharding": Said("ddp", (name,))}
    return {**zero_of(k, "", _ACCELERATE), "reduce": _messages(k, precision, cut=cut)}


def _fsdp_of(k: Account) -> dict[str, Any]:
    version, freed, wraps = f"{_FSDP}version", f"{_FSDP}reshard_after_forward", f"{_FSDP}auto_wrap_policy"
    of = dict.fromkeys(("FULL_SHARD", True), "fsdp")  # True is 1 too, the number of FULL_SHARD
    of |= dict.fromkeys(("SHARD_GRAD_OP", 2, False), "fsdp, kept")
    name = f"{_FSDP}sharding_strategy"
    if k.value(version) == 2 or k.value(name) is None:
        name = freed
    value = True if k.value(name) is None else k.value(name)
    if value not in of:
        k.refuse("weights that are whole, or sharded over a part of the replicas", name)
    k.ignore(f"of the other version of FSDP than {k.value(version)}", f"{_FSDP}sharding_strategy", freed)
    if k.value(version) == 1:
        k.stand_in(*FSDP_1, version)
    k.took(f"FSDP {k.value(version)}", version)
    if k.value(wraps) != "TRANSFORMER_BASED_WRAP":
        k.refuse("units of FSDP that are no layers", wraps)
    k.ignore("a unit for each layer", wraps)
    return {
        "sharding": Said(of.get(value, "fsdp"), (name,)),
        "host": either(k, {f"{_FSDP}offload_params": "all"}, ""),
        "deferred": Said("last", (), "accelerate sums gradients of the last micro-batch"),
    }


def _messages(k: Account, precision: str, *, cut: bool) -> Said:
    """The type in which gradients are summed over ranks: that of the weights, but for parts of sequences,
    whose gradients DeepSpeed sums in float32 unless another is asked for."""
    by_accelerate, of_wholes = f"{_ACCELERATE}{_TYPE}", "communication_data_type"
    of_parts = by_accelerate if cut and k.has(by_accelerate) and not k.has(_TYPE) else _TYPE
    name, other = (of_parts, of_wholes) if cut else (of_wholes, of_parts)
    k.ignore("of DeepSpeed, whose own key counts", by_accelerate)
    k.ignore(f"{name} holds where sequences are {'cut' if cut else 'whole'}", other)
    asked = str(k.value(name)).lower() if k.value(name) is not None else precision
    if asked not in (precision, "fp32"):
        k.refuse(f"gradients of {precision} that are sent in {asked}", name)
    return Said("fp32" if asked == "fp32" else "weights", (name,))


def trained_of(k: Account) -> dict[str, Any]:
    """The fields of adapters and frozen weights in few bits, as TRL's scripts have them."""
    on, rank = "TrainingArguments.use_peft", "TrainingArguments.lora_r"

    def of(name: str, otherwise: Any = None) -> Said:
        key = f"TrainingArguments.{name}"
        return Said(k.value(key) or otherwise, k.given_of(key))

    # peft's own targets of most models, where none are named (utils/constants.py)
    targets = of("lora_target_modules", ["q_proj", "v_proj"])
    in_few = {"TrainingArguments.load_in_4bit": 4, "TrainingArguments.load_in_8bit": 8}
    return {
        "lora": Said(k.value(rank) if k.value(on) else 0, k.given_of(on, rank)),
        "adapted": Adapted(targets, of("lora_modules_to_save"), of("use_dora")),
        "quantized": bits_of(k, in_few),
    }
