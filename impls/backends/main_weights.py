"""Main weights, which an optimizer updates, and their copies to the model's weights: rounded, or cast to
eight bits with one scale for each weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.main_gradients import GradientBucket, GradientBuffer
from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.fp8_casts import E4M3, WHOLE, fp8_amax, fp8_cast, scale_of
from spbench.impls.kernels.fp8_delayed import fp8_cast_delayed_


@dataclass(frozen=True)
class MainWeight:
    """The part of a parameter that this rank's optimizer updates.

    Attributes:
        elements: the slice of the flattened parameter.
        values: the part's values: a tensor of its own, or a view of the model's weight if ``shared``.
        gradient: the part's gradient, a view of the main gradients.
    """

    bucket: GradientBucket
    parameter: nn.Parameter
    elements: slice
    values: Tensor
    gradient: Tensor
    shared: bool

    @property
    def model_values(self) -> Tensor:
        """The :attr:`elements` of the model's own weight, with which layers compute."""
        return self.parameter.detach().view(-1)[self.elements]

    @property
    def counts_as(self) -> Tensor:
        """The values that the :attr:`elements` have in a matmul: eight-bit weights times their scale."""
        scale = getattr(self.parameter, "spbench_fp8_scale", None)
        return self.model_values if scale is None else self.model_values.to(self.values.dtype) * scale[0]


def main_weight(bucket: GradientBucket, p: nn.Parameter, *, on_host_alone: bool) -> MainWeight:
    """The part of a parameter that this rank updates. A 16-bit weight gets a float32 copy on the device,
    unless ``on_host_alone``: only the host has one."""
    elements = bucket.held(p)
    before = p.__dict__.pop("spbench_before_cast", None)
    weights = (p.detach() if before is None else before).view(-1)[elements]
    copied = weights.dtype in (torch.float16, torch.bfloat16) and not on_host_alone
    values = weights.float() if copied else weights
    if before is not None and not copied:
        values, copied = values.clone(), True
    gradient = bucket.of(bucket.gradients, p, elements)
    return MainWeight(bucket, p, elements, values, gradient, not copied)


def write_back(mains: Sequence[MainWeight], buffers: Sequence[GradientBuffer]) -> None:
    """Copy main weights to this rank's parts of the model's weights: rounded, or cast to eight bits."""
    for main in mains:
        if not main.shared and not hasattr(main.parameter, "spbench_fp8_scale"):
            main.model_values.copy_(main.values)
    parts = {main.parameter: main for main in mains}
    for buffer in (each for each in buffers if each.eight_bits):
        weights = [p for bucket in buffer.buckets for p in bucket.parameters]
        delayed = weights[0].spbench_fp8.delayed  # type: ignore[attr-defined]
        cast = _cast_parts_delayed if delayed else _cast_parts
        cast(weights, parts, buffer.buckets[0].group)


def _cast_parts(
    weights: Sequence[nn.Parameter],
    parts: dict[nn.Parameter, MainWeight],
    group: dist.ProcessGroup | None,
) -> None:
    some = next(iter(parts.values())).values
    none = some.new_zeros((), dtype=torch.promote_types(some.dtype, torch.float32))
    largest = torch.stack([fp8_amax(parts[p].values) if p in parts else none for p in weights])
    all_reduce(largest, group, dist.ReduceOp.MAX)
    scales = scale_of(largest, E4M3, power_of_two=False)
    for p, of_all, scale in zip(weights, largest, scales, strict=True):
        p.spbench_fp8_scale = scale.view(1, 1)  # type: ignore[attr-defined]
        if p in parts and parts[p].values.numel():
            cast, _ = fp8_cast(parts[p].values[None], of_all, E4M3, WHOLE, None, False)
            parts[p].model_values.copy_(cast[0])


def _cast_parts_delayed(
    weights: Sequence[nn.Parameter],
    parts: dict[nn.Parameter, MainWeight],
    group: dist.ProcessGroup | None,
) -> None:
    slots = [p.spbench_fp8.slots["weight"] for p in weights]  # type: ignore[attr-defined]
    for p, slot in zip(weights, slots, strict=True):
        p.spbench_fp8_scale = slot.scale.view(1, 1).clone()  # type: ignore[attr-defined]
        if p in parts and parts[p].values.numel():
            part = parts[p].values[None]
            cast, _ = fp8_cast_delayed_(part, slot.scale, slot.largest, E4M3, False)
            parts[p].model_values.copy_(cast[0])
    largest = torch.stack([slot.largest for slot in slots])
    all_reduce(largest, group, dist.ReduceOp.MAX)
    for slot, each in zip(slots, largest, strict=True):
        slot.largest.copy_(each)
