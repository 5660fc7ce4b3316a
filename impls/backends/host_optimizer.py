"""AdamW on the host for weights that are on the device (:mod:`spbench.impls.backends.host_adam`).

Gradients are copied to the host, and updated weights come back. A program's :class:`HostLayout` says which
other tensors the host holds, and where updated weights are rounded.

:class:`PartOnHost` has only a part of the optimizer on the host: HybridDeviceOptimizer of Megatron-Core
(core/optimizer/cpu_offloading, commit d98e8a64) at an optimizer_offload_fraction below 1.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from spbench.impls.backends.buckets import full_runs
from spbench.impls.backends.host_adam import HostAdam
from spbench.impls.backends.optimizer import Optimizer, Precision
from spbench.impls.backends.optimizer_options import HostLayout
from spbench.impls.kernels import host_copies
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.rings import wait_for_device


class _Run:
    """Weights of the device that one call updates, and the host's tensors for these weights.

    Attributes:
        master, gradient: flat tensors for all weights, in the optimizer's dtype.
        masters, gradients, buffers: views of the flat tensors in each weight's shape; ``buffers``, in the
            dtype of the weights, is empty if the layout needs none.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype, layout: HostLayout):
        self.weights, device = weights, weights[0]
        elements = sum(w.numel() for w in weights)
        make = host_copies.host_zeros if layout.pinned_masters else host_copies.pageable_zeros
        self.master = make(device, [elements], dtype)
        make = host_copies.host_zeros if layout.pinned_gradients else host_copies.pageable_zeros
        self.gradient = make(device, [elements], dtype)
        self.master.grad = self.gradient
        self.buffer = None
        if layout.sums or (layout.rounds == "pinned" and dtype != device.dtype):
            self.buffer = make(device, [elements], device.dtype)
        self.masters, self.gradients = self.views(self.master), self.views(self.gradient)
        self.buffers = [] if self.buffer is None else self.views(self.buffer)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the shapes of the weights."""
        parts = flat.split([w.numel() for w in self.weights])
        return [part.view(w.shape) for part, w in zip(parts, self.weights, strict=True)]


class HostOptimizer(HostAdam):
    """AdamW on the host for weights that are on the device.

    Args:
        weights: the weights to update.
        dtype: the dtype of masters, moments and gradients; None: float32 if the precision has masters, else
            the dtype of the weights.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        precision: Precision,
        layout: HostLayout,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ):
        self.weights, self.layout = weights, layout
        dtype = dtype or (torch.float32 if precision.master else weights[0].dtype)
        values = [w.detach() for w in weights]
        runs = full_runs(values, Tensor.numel, repeat(layout.run or 0))
        self.runs = [_Run(run, dtype, layout) for run in runs]
        self._place = [(run, at) for run in self.runs for at in range(len(run.weights))]
        super().__init__([run.master for run in self.runs], precision, values[0], **settings)
        self._loaded = False
        self._summed: set[int] = set()
        #: the streams of copies to the host and back, and an event for each gradient that the host has
        self._streams: tuple[CopyStream, CopyStream] | None = None
        self._taken: list[Any] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step, copy the weights to the masters, because weights may be set until then."""
        self._summed.clear()
        self._computing = torch.get_device_module(self.device.device).current_stream()
        if self._loaded:
            return
        self._loaded = True
        for run in self.runs:
            for at, (weight, master) in enumerate(zip(run.weights, run.masters, strict=True)):
                if weight.dtype == master.dtype:
                    host_copies.to_host_(master, weight)
                    continue
                there = run.buffers[at] if run.buffers else host_copies.host_empty_like(weight)
                host_copies.to_host_(there, weight)
                wait_for_device(weight)
                host_copies.host_copy_(master, there)

    @torch.no_grad()
    def take(self, number: int, gradient: Tensor, *, last: bool) -> None:
        run, at = self._place[number]
        if self.layout.sums:
            gradient = self._sum(number, run.buffers[at], gradient)
        if last:
            self._copy(run.gradients[at], gradient.to(run.gradient.dtype), to_host=True)

    def _sum(self, number: int, buffer: Tensor, gradient: Tensor) -> Tensor:
        """Add a gradient to the sum of the earlier micro-batches; returns the sum, on the device."""
        on_device = torch.empty_like(gradient)
        if number not in self._summed:
            self._summed.add(number)
            self._copy(buffer, gradient, to_host=True)
            self._copy(buffer, on_device, to_host=False)
        else:
            self._copy(buffer, on_device, to_host=False)
            self._copy(buffer, on_device.add_(gradient), to_host=True)
        return on_device

    def _copy(self, host: Tensor, x: Tensor, *, to_host: bool) -> None:
        """Copy x to ``host`` or, without ``to_host``, ``host`` to x. If the memory is not pinned, the host
        waits, and starts no work on the device meanwhile."""
        if self.layout.pinned_gradients:
            host_copies.to_host_(host, x) if to_host else host_copies.to_device_(x, host)
            return
        host_copies.to_pageable_(host, x) if to_host else host_copies.from_pageable_(x, host)
        self._computing.wait_stream(torch.get_device_module(x.device).current_stream())
        wait_for_device(x)

    def gradient(self, number: int) -> Tensor:
        run, at = self._place[number]
        return run.gradients[at]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """Update the weights.

        Args:
            gradients: one for each weight; None: the gradients passed to :meth:`take`, or the weights' own.
        """
        if not self.weights:
            return
        device = torch.get_device_module(self.device.device)
        if self.layout.overlaps and self._streams is None:
            self._streams = CopyStream(self.device.device), CopyStream(self.device.device)
        given = [w.grad for w in self.weights] if gradients is None else gradients
        self._taken.clear()
        with self._copying(0):
            for number, gradient in enumerate(given):
                if gradient is not None:
                    self.take(number, gradient, last=True)
                    self._taken.append(event := device.Event())
                    event.record()
        super().step()
        if self._streams is not None:
            self._streams[1].wait()

    def _copying(self, direction: int) -> AbstractContextManager[None]:
        """A context for copies to the host (0) or back (1): on a stream of their own, if there is one, after
        the work that the current stream has so far."""
        return nullcontext() if self._streams is None else self._streams[direction].behind()

    def wait(self) -> None:
        """Wait for all copies to the host, unless :meth:`arrived` waits for each weight."""
        if not self._taken or self.precision.loss_scale:
            for event in self._taken[-1:]:
                event.wait()
            super().wait()

    def arrived(self, number: int) -> None:
        if self._taken and not self.precision.loss_scale:
            self._taken[number].wait()
            self._taken[number].synchronize()

    def updated(self, number: int) -> None:
        """Copy the updated weights of run ``number`` to the device, rounded to their dtype."""
        run = self.runs[number]
        updated, narrow = run.master, run.weights[0].dtype
        if updated.dtype != narrow and self.layout.rounds != "device":
            pinned = run.buffer if self.layout.rounds == "pinned" else None
            rounded = (
                host_copies.pageable_zeros(self.device, updated.shape, narrow) if pinned is None else pinned
            )
            host_copies.host_copy_(rounded, updated)
            updated = rounded
        back = [*zip(run.weights, run.views(updated), strict=True)]
        with self._copying(1):
            for weight, there in back:
                if self.layout.rounds == "pageable" and updated is not run.master:
                    host_copies.from_pageable_(weight, there)
                elif weight.dtype == there.dtype:
                    host_copies.to_device_(weight, there)
                else:
                    wide = torch.empty_like(weight, dtype=there.dtype)
                    host_copies.to_device_(wide, there)
                    weight.copy_(wide)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(run.buffer for run in self.runs if run.buffer is not None)]


def first_of(sizes: Sequence[int], fraction: float) -> Iterator[bool]:
    """Yields whether each weight is on the host: the first weights, up to ``fraction`` of all elements."""
    enough, before = sum(sizes) * fraction, 0
    for size in sizes:
        yield before < enough
        before += size


class PartOnHost(HostOptimizer):
    """AdamW on the host for some weights, and on the device for the others, which have their masters on the
    device and are updated first.

    Args:
        weights: all weights, on the device.
        on_host: for each weight, whether the host updates it.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        on_host: Sequence[bool],
        precision: Precision,
        layout: HostLayout,
        **settings: Any,
    ):
        self._on_host = [*on_host]
        super().__init__(self._part(weights, True), precision, layout, **settings)
        self.here = self._part(weights, False)
        self.here_masters = [w.detach().float() if precision.master else w.detach() for w in self.here]
        self.rest = Optimizer(self.here_masters, replace(precision, master=False), **settings)
        self._begun = False

    def _part(self, of: Sequence[Tensor], on_host: bool) -> list[Tensor]:
        return [each for each, there in zip(of, self._on_host, strict=True) if there == on_host]

    def set_learning_rate(self, lr: float) -> None:
        super().set_learning_rate(lr)
        self.rest.set_learning_rate(lr)

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if not self._begun:  # weights may have been set until now
            self._begun = True
            for master, weight in self._copies():
                master.copy_(weight)

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (master, weight) of the device's weights whose master is a copy."""
        for master, weight in zip(self.here_masters, self.here, strict=True):
            if master.dtype != weight.dtype:
                yield master, weight.detach()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor] | None = None) -> None:
        """Update all weights from ``gradients``, one for each weight."""
        assert gradients is not None
        for master, gradient in zip(self.here_masters, self._part(gradients, False), strict=True):
            master.grad = gradient.to(master.dtype)
        if self.here:
            self.rest.step()
        for master, weight in self._copies():
            weight.copy_(master)
        super().step(self._part(gradients, True))
        for master in self.here_masters:
            master.grad = None

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(master for master, _ in self._copies()), *self.rest.tensors()]
