"""How a DeepSpeed or accelerate job shards weights, gradients and optimizer, and which weights it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import set_adapters, set_frozen_bits
from spbench.bench.tools.jobs.program_files import given_of
from spbench.bench.tools.jobs.transformers_step import FSDP_1, Adapted, Said, either

_ZERO = "zero_optimization"
_OFFLOADED = ("optimizer", "param")
_STRATEGY = "accelerate.fsdp_config.fsdp_sharding_strategy"


def set_sharding(k: Account, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the backend: FSDP where accelerate's file asks for it, else a stage of ZeRO."""
    kind = k.value("accelerate.distributed_type")
    k.took("which files count", "accelerate.distributed_type")
    if kind == "FSDP" or (kind is None and "fsdp_config" in files.get("accelerate", {})):
        if "deepspeed" in files:
            k.problems.append("accelerate.distributed_type is FSDP beside a configuration of DeepSpeed")
        _set_fsdp(k)
        k.ignore("of DeepSpeed", *(name for kind in _OFFLOADED for name in _places(kind)))
    elif kind in ("MULTI_GPU", "NO") or (kind is None and not _of_deepspeed(files)):
        if "deepspeed" in files:
            k.problems.append(f"accelerate.distributed_type is {kind} beside a configuration of DeepSpeed")
        _set_ddp(k)
    else:
        _set_zero(k)


def _of_deepspeed(files: Mapping[str, Mapping[str, Any]]) -> bool:
    return "deepspeed" in files or "deepspeed_config" in files.get("accelerate", {})


def _set_ddp(k: Account) -> None:
    """DistributedDataParallel, which accelerate takes where no other distribution is asked for."""
    k.set("training.backend", "ddp", "accelerate.distributed_type", note="DistributedDataParallel")
    if next(each.value for each in k.settings if each.path == "precision") != "fp32":
        k.approximate(
            "weights of half precision with float32 masters stand for float32 weights under autocast"
        )


def _set_fsdp(k: Account) -> None:
    fsdp = "accelerate.fsdp_config"
    if k.value(offloaded := f"{fsdp}.fsdp_offload_params"):
        k.set("training.optimizer", "host", offloaded, note="torch's CPUOffloadPolicy")
        k.set("training.parameters", "host", offloaded)
    version, freed = k.value(f"{fsdp}.fsdp_version"), f"{fsdp}.fsdp_reshard_after_forward"
    of = {"FULL_SHARD": "zero3", 1: "zero3", "SHARD_GRAD_OP": "zero2", 2: "zero2", None: "zero3"}
    value, name = k.value(_STRATEGY), _STRATEGY
    if version == 2 or value is None:
        whole = k.value(freed) in (True, None)
        value, name = (k.value(freed) if isinstance(k.value(freed), str) else ""), freed
        value = value or ("FULL_SHARD" if whole else "SHARD_GRAD_OP")
    if value not in of:
        k.refuse("weights that are whole, or sharded over a part of the replicas", name)
    k.set("training.backend", of.get(value, "zero3"), name, note="fully_shard")
    k.ignore(f"of the other version of FSDP than {version}", _STRATEGY, freed)
    if version == 1:
        k.stand_in(*FSDP_1, f"{fsdp}.fsdp_version")
    k.took(f"FSDP {version}", f"{fsdp}.fsdp_version")
    if any(each.path == "training.micro_batches" for each in k.settings):
        k.set("training.reduce_at", "last", note="accelerate sums gradients of the last micro-batch")
    wraps = f"{fsdp}.fsdp_auto_wrap_policy"
    if k.value(wraps) != "TRANSFORMER_BASED_WRAP":
        k.refuse("units of FSDP that are no layers", wraps)
    k.ignore("a unit for each layer", wraps)


def _set_zero(k: Account) -> None:
    stage, name = k.chosen("accelerate.deepspeed_config.zero_stage", f"{_ZERO}.stage")
    buckets = [f"{_ZERO}.{each}" for each in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm")]
    fetched = [f"{_ZERO}.stage3_prefetch_bucket_size", f"{_ZERO}.stage3_max_live_parameters"]
    if stage not in (1, 2, 3):
        k.refuse("DeepSpeed's own data parallelism, without ZeRO" if stage == 0 else "a stage of ZeRO", name)
        return
    if stage == 1:
        k.set("training.backend", "megatron", name, note="weights and gradients whole, in one buffer each,")
        k.set("training.distributed_optimizer", True, name, note="masters and moments in parts")
        k.set("training.accumulate_allreduce_grads_in_fp32", False, name, note="gradients as the weights")
        k.set("training.gradient_accumulation_fusion", False, note="no matmul adds to a gradient")
        k.set("training.check_for_nan_in_loss_and_grad", False, note="no pass looks for NaN")
        k.approximate("gradients are summed after backward in buffers of Megatron-Core's sizes")
    else:
        k.set("training.backend", f"zero{stage}", name, note="torch's fully_shard, a layer a unit")
    if stage == 2:
        k.approximate(
            "weights are gathered in forward, not after the optimizer's step; the sums of bytes differ"
        )
    _set_offloading(k, stage)
    _set_messages(k, stage)
    size = k.value(buckets[0])
    if stage < 3 and size != "auto":
        overlapped = k.value(buckets[2]) is True
        gib = size * 2 * (2 if overlapped else 1) / 2**30
        k.approximate(
            f"DeepSpeed's buckets of reduce_bucket_size, {gib:.2f} GiB more, are not held",
            *buckets,
        )
    if stage == 3:
        k.approximate("a layer's weights are gathered at once, without the next prefetch bucket", *fetched)
    k.ignore(f"of another stage of ZeRO than {stage}, or as large as the job makes them", *buckets, *fetched)


def _set_messages(k: Account, stage: int) -> None:
    """Set the type in which gradients are summed over ranks: that of the weights, but for parts of sequences,
    whose gradients DeepSpeed sums in float32 unless another is asked for."""
    of_parts, of_wholes = "seq_parallel_communication_data_type", "communication_data_type"
    parts = any(each.path == "sizes.sp" for each in k.settings)
    by_accelerate = f"accelerate.deepspeed_config.{of_parts}"
    if parts and k.has(by_accelerate) and not k.has(of_parts):
        of_parts = by_accelerate
    name, other = (of_parts, of_wholes) if parts else (of_wholes, of_parts)
    k.ignore(
        "of DeepSpeed, whose own key counts",
        "accelerate.deepspeed_config.seq_parallel_communication_data_type",
    )
    k.ignore(f"{name} holds where sequences are {'cut' if parts else 'whole'}", other)
    precision = next(each.value for each in k.settings if each.path == "precision")
    asked = str(k.value(name)).lower() if k.value(name) is not None else precision
    if asked == precision:
        k.took(f"gradients are sent in {precision}", name)
    elif asked != "fp32":
        k.refuse(f"gradients of {precision} that are sent in {asked}", name)
    elif stage == 1:
        k.approximate("gradients are sent in the type of the weights, not in float32, twice the bytes", name)
    else:
        k.set("training.reduce_dtype", "fp32", name)


def _places(kind: str) -> tuple[str, str]:
    """The keys that say where DeepSpeed keeps its optimizer or its param."""
    return f"accelerate.deepspeed_config.offload_{kind}_device", f"{_ZERO}.offload_{kind}.device"


def _set_offloading(k: Account, stage: int) -> None:
    """Set what a stage of ZeRO keeps on the host."""
    (optimizer, name), (param, of_param) = (k.chosen(*_places(kind)) for kind in _OFFLOADED)
    for place, key in ((optimizer, name), (param, of_param)):
        if place not in ("cpu", "none", None):
            k.refuse("keeping weights or optimizer on a disk", key)
    if param == "cpu" and (optimizer != "cpu" or stage < 3):
        k.refuse("weights on the host without the optimizer, or below ZeRO-3", of_param)
        return
    if optimizer == "cpu":
        k.set("training.optimizer", "host", name)
    if stage == 1 and optimizer == "cpu":
        k.approximate("the host holds what Megatron-Core's optimizer does, 2 bytes a parameter less")
    if param == "cpu":
        k.set("training.parameters", "host", of_param)
        k.approximate("weights wait on the host in float32, as torch's CPUOffloadPolicy has them")


def set_trained(k: Account, fields: Mapping[str, Any]) -> None:
    """Set adapters and frozen weights in few bits, as trl's scripts have them; ``fields`` are those of the
    model's config.json."""
    on, rank = "TrainingArguments.use_peft", "TrainingArguments.lora_r"

    def of(name: str, otherwise: Any = None) -> Said:
        key = f"TrainingArguments.{name}"
        return Said(k.value(key) or otherwise, given_of(k, key))

    lora = Said(k.value(rank) if k.value(on) else 0, given_of(k, on, rank))
    # peft's own targets of most models, where none are named (utils/constants.py)
    targets = of("lora_target_modules", ["q_proj", "v_proj"])
    set_adapters(k, lora, fields, Adapted(targets, of("lora_modules_to_save"), of("use_dora")))
    in_few = {"TrainingArguments.load_in_4bit": 4, "TrainingArguments.load_in_8bit": 8}
    set_frozen_bits(k, either(k, in_few, 0), lora, fields)
