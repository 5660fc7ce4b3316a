"""What the stages of DeepSpeed's ZeRO share: streams, and the update of float32 partitions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from spbench.impls.backends.backend import Backend
from spbench.impls.options import Options


@dataclass(frozen=True)
class DeepSpeedOptions(Options):
    """Options of every stage of ZeRO, by DeepSpeed's keys of ``zero_optimization`` (runtime/zero/config.py).
    Sizes are numbers of elements.

    Attributes:
        overlap_comm: send on streams of their own instead of on the computing stream.
        contiguous_gradients: copy each gradient into a buffer of ``reduce_bucket_size`` elements.
        reduce_bucket_size: gradients that are summed over ranks at once.
        reduce_dtype: the dtype of gradients while they are summed over ranks: the weights', or "fp32"
            (``communication_data_type``; fp32 by default where ranks share sequences).
        implementation: kernels of the optimizer, as :class:`OptimizerOptions` has them.
    """

    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_bucket_size: int = 500_000_000
    reduce_dtype: Literal["weights", "fp32"] = "weights"
    implementation: Literal["fused", "foreach"] = "fused"


class DeepSpeedStage(Backend):
    """A stage of ZeRO with the optimizer on the device."""

    searched = False
    spans_layers = True  # in buckets
    pipelined = False
    options_type = DeepSpeedOptions
    options: Any

    def open_streams(self, device: str, number: int) -> None:
        """Make streams for messages, None where the computing stream sends them."""
        self.streams = [None] * number
        if self.options.overlap_comm:
            self.streams = [torch.get_device_module(device).Stream() for _ in self.streams]

    def on(self, number: int, like: Tensor) -> AbstractContextManager[None]:
        """A context on a stream for messages, on the device of ``like``."""
        stream, module = self.streams[number], torch.get_device_module(like.device)
        return nullcontext() if stream is None else module.stream(stream)

    def behind_compute(self, number: int, like: Tensor) -> None:
        """Let a stream for messages wait for what the computing stream has so far."""
        if (stream := self.streams[number]) is not None:
            stream.wait_stream(torch.get_device_module(like.device).current_stream())

    def wide(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of the dtype ``own`` are summed."""
        return torch.promote_types(own, torch.float32) if self.options.reduce_dtype == "fp32" else own

    def update(
        self, gradients: Sequence[Callable[[], Tensor]], masters: Sequence[Tensor], shards: Sequence[Tensor]
    ) -> None:
        """Update masters one after another, and then their shards in the weights' dtype; under a loss scale,
        which is for all of them, at once. ``gradients`` make each master's gradient."""
        places = [*zip(gradients, masters, shards, strict=True)]
        for at_once in [places] if self.precision.loss_scale else ([place] for place in places):
            for gradient, master, _ in at_once:
                master.grad = gradient().mul_(1)
            self.optimizer.step()
            for _, master, shard in at_once:
                master.grad = None
                shard.copy_(master)
