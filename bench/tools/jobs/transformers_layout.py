"""How a transformers job is spread: the layers of stages, the micro-batches that they run, and over which
ranks experts are spread; how weights, gradients and optimizer are sharded, their dtypes, where they are, and
which of them are trained.

Pipelines and experts are as NeMo Automodel has them (commit 36044ad3: components/distributed/pipelining/
functional.py and components/moe/parallelizer.py), by torch.distributed.pipelining and ``fully_shard``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import set_adapters, set_frozen_bits
from spbench.bench.tools.jobs.transformers_step import EXPERTS, TransformersStep

#: by torch's name of a schedule, without its hyphens and lines: ours
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}
#: by what a program calls them: files of impls/dispatchers
DISPATCHERS = {
    **dict.fromkeys(("deepep", "uccl_ep", "mok"), "node_deduplicated"),
    "hybridep": "hybrid_ep",
    "torch": "all_gather",
    "alltoall": "all_to_all",
}


def layers_of(stages: int, layers: int) -> list[int]:
    """How many layers each stage has: the first have one more than the last."""
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def stages_of(layers: int, each: int | None, ranks: int, several: bool, rounded: str) -> int:
    """How many stages of ``each`` layers a pipeline has; ``several``: a rank has more than one."""
    if each is None:
        return ranks * (1 + several)
    stages = -(-layers // max(1, each))
    if rounded == "down":
        return stages - stages % ranks
    return stages + -stages % ranks if rounded == "up" else stages


def set_pipeline(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set the schedule of a pipeline and the layers of its stages; ``fields`` are of the config.json."""
    ranks, names = step.pipeline.value, step.pipeline.names
    of_pipelines = (step.schedule, step.stage_layers, step.rounded, step.piece)
    if ranks == 1:
        idle = [name for each in of_pipelines for name in each.names]
        k.ignore("of pipelines, which the job has not", *idle, *names)
        return
    schedule = SCHEDULES.get(str(step.schedule.value).lower().replace("_", ""))
    layers = fields.get("num_hidden_layers")
    k.set("sizes.pp", ranks, *names)
    if schedule is None:
        k.refuse(f"another schedule of a pipeline than {', '.join(SCHEDULES)}", *step.schedule.names)
        return
    if not isinstance(layers, int):
        return  # of a model that is not known
    several = schedule == "interleaved"
    stages = stages_of(layers, step.stage_layers.value, ranks, several, str(step.rounded.value))
    if stages % ranks or (stages > ranks) != several or not ranks <= stages <= layers:
        have = f"{layers} layers in {stages} stages"
        k.problems.append(f"{have} are no pipeline of {ranks} ranks by {step.schedule.value}")
        return
    k.set("training.schedule", schedule, *step.schedule.names)
    if several:
        k.set("training.virtual_stages", stages // ranks, *step.stage_layers.names, *step.rounded.names)
        # torch.distributed.pipelining starts its sends and goes on
        k.set(
            "training.overlap_p2p_communication", True, *step.schedule.names, note="sends are waited for late"
        )
    if len({*(sizes := layers_of(stages, layers))}) > 1:
        k.set("training.stage_layers", sizes, *step.stage_layers.names, note="the first stages have one more")
    k.took(f"{stages} stages", *step.stage_layers.names, *step.rounded.names)


def set_pieces(k: Account, step: TransformersStep, runs: int, names: Sequence[str]) -> None:
    """Set the micro-batches of a step: those of ``runs`` whose gradients are added up, of which each is cut
    in pieces where there is a pipeline."""
    local, piece, ranks = step.micro_batch.value, step.piece.value, step.pipeline.value
    if ranks == 1:
        if runs > 1:
            k.set("training.micro_batches", runs, *names)
        if runs > 1 and step.deferred.value and str(step.sharding.value).startswith("fsdp"):
            note = "gradients are whole, in the dtype of the sum, until the last micro-batch"
            k.set("training.reduce_at", step.deferred.value, *step.deferred.names, note=note)
        k.ignore("each step has one micro-batch, or a pipeline", *step.deferred.names)
        return
    k.took("a pipeline sums gradients once", *step.deferred.names)
    if type(piece) is not int or piece < 1 or local % piece:
        k.problems.append(f"a batch of {local} is no multiple of a pipeline's micro-batch of {piece}")
        return
    pieces = local // piece
    k.set("training.micro_batches", pieces * runs, *step.micro_batch.names, *step.piece.names, *names)
    if runs > 1:
        because = (
            f"one pipeline of {pieces * runs} micro-batches stands for {runs} of {pieces}: a step lacks the "
            f"bubbles of {runs - 1}"
        )
        k.stand_in("a pipeline that runs several times a step", "time", because, *names)


def set_experts(k: Account, step: TransformersStep, fields: Mapping[str, Any]) -> None:
    """Set over how many ranks experts are spread, and how tokens reach them."""
    ranks, names = step.experts.value, step.experts.names
    count = next((fields[name] for name in EXPERTS if fields.get(name)), 0)
    if ranks > 1 and fields and not count:
        k.problems.append(f"{' and '.join(map(k.spelled, names))}: the model has no experts")
        return
    if count and step.tensor.value > 1 and step.tensor_by.value == "tensor_parallel":
        k.refuse("tensor parallelism whose ranks have the same tokens, beside experts", *step.tensor.names)
    if ranks > 1:
        k.set("sizes.ep", ranks, *names, note="what is left of a stage's ranks shards each expert")
        sizes = [each.value for each in k.settings if each.path in ("sizes.dp", "sizes.sp", "sizes.tp")]
        if step.own_experts.value and step.half.value and ranks == math.prod(sizes):
            k.set("training.own_weights", "apart", *names, note="a rank's own experts are in no unit of FSDP")
        dispatcher = DISPATCHERS.get(str(step.dispatcher.value))
        if dispatcher is not None:
            k.set("model_options.dispatcher", dispatcher, *step.dispatcher.names, note=step.dispatcher.note)
    k.ignore("one part: not split", *names)
    k.ignore("no expert is on another rank", *step.dispatcher.names)
    if count and step.routing.value:
        k.set("model_options.routing", step.routing.value, *step.routing.names)
    k.ignore("experts get what the router chooses", *step.routing.names)
    if fields.get("num_nextn_predict_layers") is not None or step.predicted.value:
        note = "" if step.predicted.names else "transformers leaves them out"
        k.set("model_options.mtp_layers", step.predicted.value or 0, *step.predicted.names, note=note)
    k.ignore("no module of multi-token prediction", *step.predicted.names)


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
