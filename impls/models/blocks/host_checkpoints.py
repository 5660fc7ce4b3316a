"""Activation checkpoints on the host: what full recomputation keeps, copied off the device until backward.

Forward copies the input of each run of layers to pinned memory of the host, on a stream of its own, beside
the computing of that run. The device's copy is given up when the next run begins, which waits until it has
been copied. While backward runs a run of layers again, the input of the run before is fetched, so that one
input is on the device beside that in use. The last input of a forward stays until something else is kept:
where backward follows at once it need not be fetched.
At each wait for the :class:`CopyStream` the newest copy is the one that is meant.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.kernels.host_copies import (
    from_pageable_,
    host_empty_like,
    pageable_empty_like,
    to_device_,
    to_host_,
    to_pageable_,
)
from spbench.impls.rings import wait_for_device


class _Checkpoint:
    """An input that is kept.

    Attributes:
        host: in the host's memory.
        x: on the device, until it has been copied away, and from when it is being copied back; None: it is
            not there.
        before: that of the run of layers before, which backward needs next; None: there is none.
    """

    def __init__(self, host: Tensor, x: Tensor, before: _Checkpoint | None):
        self.host, self.before = host, before
        self.x: Tensor | None = x


class HostCheckpoints:
    """Keeps the inputs of recomputed layers of one module on the host."""

    def __init__(self) -> None:
        #: made on the device of the first input
        self._copies: CopyStream | None = None
        #: the newest of this forward; what is kept belongs to the graph
        self._newest: weakref.ref[_Checkpoint] | None = None
        #: whose tensor on the device is still being copied to the host
        self._leaving: _Checkpoint | None = None

    def begin(self) -> None:
        """A forward begins: what it keeps is fetched in its own backward."""
        self._newest = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, what autograd saves is kept on the host, but for what has no elements."""
        with saved_tensors_hooks(self._keep, self._back):
            yield

    def _keep(self, x: Tensor) -> Tensor | _Checkpoint:
        if not x.numel():  # torch's checkpoint saves an empty tensor beside the inputs
            return x
        if self._copies is None:
            self._copies = CopyStream(x.device)
        if (left := self._leaving) is not None:
            self._copies.wait()
            self._leaving = left.x = None
        kept = _Checkpoint(self._copies.to_host(x), x, None if self._newest is None else self._newest())
        self._newest, self._leaving = weakref.ref(kept), kept
        return kept

    def _back(self, kept: Tensor | _Checkpoint) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        assert self._copies is not None
        x, kept.x = self._copies.to_device(kept.host) if kept.x is None else kept.x, None
        if kept is self._leaving:
            self._leaving = None
        # it has been copied, here or away: only then may it be read, and its memory be freed
        self._copies.wait()
        if (before := kept.before) is not None and before.x is None:
            before.x = self._copies.to_device(before.host)
        return x


class SavedOnCpu(HostCheckpoints):
    """In pinned memory, as torch.autograd.graph.save_on_cpu(pin_memory=True) keeps them: the computing stream
    copies an input away when its run begins, and the program waits; the same stream copies it back when
    backward asks for it, and no input is fetched ahead."""

    def _keep(self, x: Tensor) -> Any:
        if not x.numel():
            return x
        host = host_empty_like(x)
        to_host_(host, x)
        wait_for_device(x)
        return host, x.device

    def _back(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        host, device = kept
        x = torch.empty(host.shape, dtype=host.dtype, device=device)
        self._fill(x, host)
        return x

    def _fill(self, x: Tensor, host: Tensor) -> None:
        """Copy to the device what has been kept."""
        to_device_(x, host)


class PageableCheckpoints(SavedOnCpu):
    """In memory that is not pinned, as ALST's checkpoint function (``CheckpointFunctionWithCPUOffload`` of
    ArcticTraining) and DeepSpeed's (``checkpoint_in_cpu`` until 0.19) keep them, by ``tensor.to``: the
    program waits for the copies back too.

    Args:
        angles: elements of a cos and of a sin that are copied away with each input, and used on the device
            all the same: other tensors among a run's arguments, as Megatron-DeepSpeed has them.
    """

    def __init__(self, angles: int = 0):
        super().__init__()
        self._angles: list[Tensor] = []
        self._elements = angles

    def _keep(self, x: Tensor) -> Any:
        if not x.numel():
            return x
        if self._elements and not self._angles:
            self._angles = [x.new_ones(self._elements) for _ in range(2)]
        for each in self._angles:
            to_pageable_(pageable_empty_like(each), each)
            wait_for_device(each)
        host = pageable_empty_like(x)
        to_pageable_(host, x)
        wait_for_device(x)
        return host, x.device

    def _fill(self, x: Tensor, host: Tensor) -> None:
        from_pageable_(x, host)
        wait_for_device(x)


def checkpoints_on_host(where: str, angles: int = 0) -> HostCheckpoints | None:
    """What keeps inputs of layers where the option ``checkpoints`` says; None: they stay on the device.
    ``angles`` as in :class:`PageableCheckpoints`."""
    if where == "pageable":
        return PageableCheckpoints(angles)
    return {"host": HostCheckpoints, "save_on_cpu": SavedOnCpu}[where]() if where != "device" else None
