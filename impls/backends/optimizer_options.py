"""The option of all backends whose optimizer may be on the host, and how DeepSpeed and Megatron-Core hold its
state there and round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spbench.impls.options import Options, Saving, check_choices


@dataclass(frozen=True)
class HostLayout:
    """How a program holds, on the host, the optimizer's state for weights on the device.

    Attributes:
        run: elements that are enough for weights to lie in one tensor and be updated at once; None: each
            weight has tensors of its own.
        pinned_masters: masters are in pinned memory.
        sums: gradients of micro-batches are summed in a buffer of the weights' dtype, where gradients are.
        pinned_gradients: gradients are in pinned memory; else the host waits for each copy of one.
        rounds: where updated weights are rounded to their own dtype: on the "device", a weight at a time; on
            the host into a pinned buffer ("pinned"), or into pageable memory that is then freed ("pageable").
        overlaps: copies have streams of their own, so that the host updates weights that have arrived while
            others are copied.
    """

    run: int | None
    pinned_masters: bool
    sums: bool = False
    pinned_gradients: bool = True
    rounds: str = "device"
    overlaps: bool = False


#: offload_optimizer of DeepSpeed's ZeRO-3 (runtime/zero/stage3.py, commit edaa722): in sub-groups of
#: sub_group_size elements; partition_grads sums in grad_partitions_flat_buffer, on the device, and sends
#: that up again for the last micro-batch, wide; copy_ that waits rounds on the host
DEEPSPEED_STAGE_3 = HostLayout(10**9, pinned_masters=False, sums=True, rounds="pageable")
#: that of its ZeRO-1 and 2 (runtime/zero/stage_1_and_2.py): all at once, rounded into
#: param_buffer_of_bit16_for_cpu_offload_groups
DEEPSPEED_STAGE_1 = HostLayout(2**62, pinned_masters=True, rounds="pinned", overlaps=True)
#: HybridDeviceOptimizer of Megatron-Core (core/optimizer/cpu_offloading, commit d98e8a64), which is one for
#: any weights; with its overlap_cpu_optimizer_d2h_h2d
EACH_WEIGHT = HostLayout(None, pinned_masters=True, overlaps=True)


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """Where the optimizer is.

    Attributes:
        optimizer: where masters and moments are, and what updates the weights: the "device", or the "host"
            with its memory and cores; each backend names the program that it follows.
        implementation: of an optimizer on the device: "fused": one kernel; "foreach": torch's own default, a
            kernel for each operation on all weights, between which the roots of all second moments live.

    Raises:
        ValueError: it is another word.
    """

    optimizer: Literal["device", "host"] = "device"
    implementation: Literal["fused", "foreach"] = "fused"

    def __post_init__(self) -> None:
        check_choices(self, {"optimizer": ("device", "host"), "implementation": ("fused", "foreach")})
        if (self.optimizer, self.implementation) == ("host", "foreach"):
            raise ValueError("implementation: foreach needs the optimizer on the device; leave it out")

    def savings(self) -> Iterator[Saving]:
        if self.optimizer == "device":
            yield Saving({"optimizer": "host"}, "the host holds masters and moments, and updates the weights")
