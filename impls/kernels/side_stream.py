"""A second stream, next to the computing stream, for the forward and backward of parts of a layer.

Autograd calls the functions of a part one after another, because forward called them one after another. On
GPUs autograd runs each on the stream of its forward; elsewhere the two ends of a part, each an
:class:`_Edge`, switch streams. In simulated steps, kernels of both streams do not slow each other down.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class SideStream:
    """A second stream of a device; the computing stream is the current one."""

    def __init__(self) -> None:
        #: made on the device of the first tensor
        self._module: Any = None
        self._stream: Any = None
        self._entered: list[AbstractContextManager[Any]] = []

    def follow(self, x: Tensor) -> None:
        """Have later work of this stream wait for all work that the computing stream has so far. x is any
        tensor of the device."""
        if self._stream is None:
            self._module = torch.get_device_module(x.device)
            self._stream = self._module.Stream()
        self._stream.wait_stream(self._module.current_stream())

    def run(self, work: Callable[..., Tensors], *xs: Tensor) -> Tensors:
        """Returns ``work(*xs)``, run on this stream after :meth:`follow`. Backward of ``work`` also runs on
        this stream, after all work that the computing stream has by then."""
        with self._module.stream(self._stream):
            if not any(x.requires_grad for x in xs):
                return work(*xs)
            results: Tensors = _Edge.apply(self.enter, *work(*_Edge.apply(self.leave, *xs)))
            return results

    def awaited(self, x: Tensor) -> Tensor:
        """Returns x; in the backward of x, the computing stream waits for this stream."""
        y: Tensor = _Edge.apply(self.wait_on_cpu, x)[0]
        return y

    def wait(self) -> None:
        """Have the computing stream wait for all work that this stream has so far."""
        self._module.current_stream().wait_stream(self._stream)

    def enter(self, *gradients: Tensor) -> None:
        """Switch to this stream, because backward of a part begins (on CPUs; GPUs do so by themselves)."""
        if gradients[0].device.type == "cpu":
            self.follow(gradients[0])
            self._entered.append(self._module.stream(self._stream))
            self._entered[-1].__enter__()

    def leave(self, *gradients: Tensor) -> None:
        """Switch back to the computing stream, because backward of a part ends."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def wait_on_cpu(self, *gradients: Tensor) -> None:
        """:meth:`wait`, because backward needs this stream's work (on CPUs; GPUs do so by themselves)."""
        if any(each.device.type == "cpu" for each in gradients):
            self.wait()


class _Edge(torch.autograd.Function):
    """A function that returns its arguments ``xs``; its backward calls ``effect`` of their gradients."""

    @staticmethod
    def forward(ctx: Any, effect: Callable[..., None], *xs: Tensor) -> Tensors:
        ctx.effect = effect
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.effect(*(each for each in gradients if each is not None))
        return None, *gradients
