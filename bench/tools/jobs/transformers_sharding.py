"""Weights, gradients and optimizer of a transformers job: how they are sharded, their dtypes, where they are,
and which of them are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import set_adapters, set_frozen_bits
from spbench.bench.tools.jobs.transformers_step import TransformersStep

#: by TransformersStep.sharding
_BACKENDS = {
    "zero1": "megatron",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp": "zero3",
    "fsdp, kept": "zero2",
    "ddp": "ddp",
    "alone": "unwrapped",
}

#: bits of a moment, and how many bytes two in float32 have more for a weight
_IN_FEW_BITS = {"adam 8 bits": (8, 6), "adam 4 bits": (4, 7)}


def set_sharding_of(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set the backend, dtypes, what the host holds, and what stands for other optimizers; ``fields``
    are those of the model's config.json."""
    kind, names = step.sharding.value, step.sharding.names
    if kind == "ddp" and step.half.value and any((s.path, s.value) == ("sizes.dp", 1) for s in k.settings):
        kind = "alone"
    of_torch = kind.startswith("fsdp")
    if kind.startswith("zero") and k.table.content["trains"] == "transformers":
        k.set("program", "deepspeed", *names)
    whole = kind in ("ddp", "zero1")
    note = "torch's fully_shard, a layer a unit"
    if whole or kind == "alone":
        note = "weights and gradients whole"
    k.set("training.backend", _BACKENDS[kind], *names, note=note)
    if kind == "zero1":
        k.set("training.distributed_optimizer", True, *names, note="masters and moments in parts")
        k.set("training.accumulate_allreduce_grads_in_fp32", False, *names, note="gradients as the weights")
        k.set("training.gradient_accumulation_fusion", False, note="no matmul adds to a gradient")
        k.set("training.check_for_nan_in_loss_and_grad", False, note="no pass looks for NaN")
        k.approximate("gradients are summed after backward in buffers of Megatron-Core's sizes")
    elif kind == "ddp" and step.precision.value != "fp32":
        k.approximate(
            "weights of half precision with float32 masters stand for float32 weights under autocast"
        )
    elif step.reduce.value == "fp32" and not whole and step.precision.value != "fp32":
        k.set("training.reduce_dtype", "fp32", *step.reduce.names, note=step.reduce.note)
    if step.reduce.value != "fp32":
        k.took("gradients are summed in the dtype of the weights", *step.reduce.names)
    if kind == "zero3":
        k.approximate("a layer's weights are gathered at once, without the next prefetch bucket")
    elif kind == "zero2":
        k.approximate(
            "weights are gathered in forward, not after the optimizer's step; the sums of bytes differ"
        )
    if kind == "zero3" and isinstance(step.buffer.value, int) and step.buffer.value > 0:
        kib = -(-2 * step.buffer.value // 1024)
        k.set(
            "training.gradient_buffer_kib", kib, *step.buffer.names, note="reduce_bucket_size, 2 bytes each,"
        )
    if step.half.value and not whole and step.precision.value != "fp32":
        k.set("training.state_dtype", "weights", *step.half.names, note=step.half.note)
    elif step.half.value and whole:
        because = "masters and moments are counted in float32, up to 8 bytes a weight too much"
        k.stand_in("an optimizer without float32", "memory", because, *step.half.names)
    k.took("float32 masters and moments", *step.half.names)
    _host(k, step, of_torch)
    _trained(k, step, fields)


def _host(k: Account, step: TransformersStep, of_torch: bool) -> None:
    held, names = step.host.value, step.host.names
    if held == "params" and not of_torch:
        because = "weights stay on the device, of 2 bytes each, over the replicas"
        k.stand_in("weights on the host without the optimizer", "time and memory", because, *names)
    elif held:
        k.set("training.optimizer", "host", *names)
        if step.sharding.value == "zero1":
            k.approximate("the host holds what Megatron-Core's optimizer does, 2 bytes a parameter less")
        if held == "all" and step.sharding.value in ("zero3", "fsdp"):
            k.set("training.parameters", "host", *names)
            if not of_torch:
                k.approximate("weights wait on the host in float32, as torch's CPUOffloadPolicy has them")
    k.ignore("the device holds all", *names)


def _trained(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set which weights are trained, and say what stands for another optimizer."""
    optimizer, names = step.optimizer.value, step.optimizer.names
    if optimizer in _IN_FEW_BITS:
        bits, more = _IN_FEW_BITS[optimizer]
        because = f"moments are counted in float32, {more} bytes a weight, over the replicas, too much"
        k.stand_in(f"an optimizer in {bits} bits", "memory", because, *names)
    elif optimizer == "muon":
        because = (
            "Adam stands for it: one moment of each matrix more, no matmuls of Newton-Schulz steps, and no "
            "all-gathers for them"
        )
        k.stand_in("Muon under FSDP", "time and memory", because, *names)
    elif optimizer != "adam":
        k.refuse("another optimizer than Adam and Muon", *names)
    k.took("Adam, the optimizer that there is", *names)
    if step.foreach.value and optimizer == "adam" and not step.host.value and step.precision.value != "fp16":
        k.set("training.implementation", "foreach", *step.foreach.names, note=step.foreach.note)
    set_adapters(k, step.lora, fields, step.adapted, experts=step.adapted_experts.value)
    set_frozen_bits(k, step.quantized, step.lora, fields, tiles=bool(step.mlp_tiles.value))
