"""The options of backends whose optimizer may be on the host, and the layouts in which DeepSpeed and
Megatron-Core hold the optimizer's state on the host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spbench.impls.options import Options, Saving


@dataclass(frozen=True)
class HostLayout:
    """How a program holds, on the host, the optimizer's state for weights on the device.

    Attributes:
        run: elements of consecutive weights that share one tensor and one update; None: each weight has
            tensors of its own.
        pinned_masters: whether masters are in pinned memory.
        sums: whether micro-batches' gradients are summed in a buffer of the weights' dtype on the host.
        pinned_gradients: whether gradients are in pinned memory; else the host waits for each copy.
        rounds: where updated weights are rounded to their own dtype: on the "device", a weight at a time; on
            the host into a pinned buffer ("pinned"), or into pageable memory that is then freed ("pageable").
        overlaps: whether copies have streams of their own, so that the host updates some weights while other
            gradients are copied.
    """

    run: int | None
    pinned_masters: bool
    sums: bool = False
    pinned_gradients: bool = True
    rounds: str = "device"
    overlaps: bool = False


#: offload_optimizer of DeepSpeed's ZeRO-3 (runtime/zero/stage3.py, commit edaa722): sub-groups of
#: sub_group_size elements; partition_grads sums on the device with grad_partitions_flat_buffer, and copies
#: the sum to the host again in float32 for the last micro-batch; a copy_ that waits rounds on the host
DEEPSPEED_STAGE_3 = HostLayout(10**9, pinned_masters=False, sums=True, rounds="pageable")
#: offload_optimizer of DeepSpeed's ZeRO-1 and 2 (runtime/zero/stage_1_and_2.py): all weights at once, rounded
#: into param_buffer_of_bit16_for_cpu_offload_groups
DEEPSPEED_STAGE_1 = HostLayout(2**62, pinned_masters=True, rounds="pinned", overlaps=True)
#: HybridDeviceOptimizer of Megatron-Core (core/optimizer/cpu_offloading, commit d98e8a64) with
#: overlap_cpu_optimizer_d2h_h2d, for any weights
EACH_WEIGHT = HostLayout(None, pinned_masters=True, overlaps=True)


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """Options that say where the optimizer is, and with which kernels it updates.

    Attributes:
        optimizer: "device": masters and moments are on the device, which updates the weights; "host": they
            are in the host's memory, whose cores update; each backend names the program that it follows.
        implementation: kernels of an optimizer on the device: "fused": one kernel; "foreach": torch's
            default, a kernel for each operation on all weights, between which the roots of all second moments
            live.

    Raises:
        ValueError: an option has another word, or "foreach" is set with the optimizer on the host.
    """

    optimizer: Literal["device", "host"] = "device"
    implementation: Literal["fused", "foreach"] = "fused"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.optimizer, self.implementation) == ("host", "foreach"):
            raise ValueError("implementation: foreach needs the optimizer on the device; leave it out")

    def savings(self) -> Iterator[Saving]:
        if self.optimizer == "device":
            yield Saving({"optimizer": "host"}, "the host holds masters and moments, and updates the weights")
