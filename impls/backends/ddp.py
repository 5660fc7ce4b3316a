"""Data parallelism as in PyTorch's DDP (Li et al., arXiv 2006.15704), with the optimizer of fairseq.

Bytes a parameter in half precision: weight 2 and bucket 2, gradient 2 from backward to the next step, and the
optimizer's float32 master 4, gradient 4 (kept, as fairseq's FP16Optimizer does) and moments 8. With
``optimizer: host`` the optimizer's 16 bytes are on the host, as in Megatron-Core's HybridDeviceOptimizer.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from spbench.impls.backends.backend import Backend, BytesInBackward
from spbench.impls.backends.buckets import BucketedGradients
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.optimizer_options import OptimizerOptions
from spbench.impls.backends.planned_step import PlannedStep
from spbench.impls.composition import trained_parameters
from spbench.impls.traffic import Traffic


class DistributedDataParallel(Backend):
    """All gradients and the whole optimizer on every rank; see :class:`BucketedGradients`."""

    name = "ddp"
    shares_out = frozenset()
    options_type = OptimizerOptions

    def prepare(self) -> Optimizer:
        self.buckets = BucketedGradients(self.summed(), list(self.names))
        return self.make_optimizer(list(self.names), master_gradients="kept")

    def zero(self) -> None:
        self.buckets.zero()

    def begin_last_backward(self, stage: nn.Module) -> None:
        self.buckets.expect_last(trained_parameters(stage))

    def synchronize(self) -> None:
        self.buckets.finish()
        self.around.add_tied(self.module)

    @classmethod
    def bytes_in_backward(cls, precision: Precision, options: Any, staged: bool) -> BytesInBackward:
        return BytesInBackward(precision.parameters.itemsize)  # the gradients that are copied to buckets

    def held_gradients(self) -> list[Tensor]:
        return self.buckets.tensors()

    @classmethod
    def traffic(cls, step: PlannedStep) -> Iterator[Traffic]:
        for summed in step.summed:
            # however the elements are cut into buckets, a ring sends the same bytes
            payload = summed.elements * step.element_bytes
            yield Traffic("backward", "gradients, all buckets", "all_reduce", 1, payload, summed.group_axes)
