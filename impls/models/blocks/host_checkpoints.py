"""Activation checkpoints on the host: the inputs of recomputed layers, copied off the device until backward.

Forward copies the input of each run of layers to pinned memory of the host, on a copy stream, while the run
computes. The next run waits for the copy and then frees the device's tensor. While backward runs
a run of layers again, the copy stream fetches the input of the run before, so that two inputs are on the
device. The last input of a forward stays on the device until the next input is kept, so that a backward that
follows at once need not fetch the last input. Each wait for the :class:`CopyStream` is for the newest copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from spbench.impls.kernels import host_copies
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.rings import wait_for_device


class _Checkpoint:
    """A kept input of a run of layers.

    Attributes:
        host: the copy in the host's memory.
        x: the tensor on the device, before the copy to the host ends and after the copy back begins; None:
            the input is only on the host.
        before: the checkpoint of the run before, which backward needs next; None: there is no such run.
    """

    def __init__(self, host: Tensor, x: Tensor, before: _Checkpoint | None):
        self.host, self.before = host, before
        self.x: Tensor | None = x


class HostCheckpoints:
    """Keeps the inputs of one module's recomputed layers in pinned memory of the host until backward."""

    def __init__(self) -> None:
        #: the copy stream, made on the device of the first input
        self._copies: CopyStream | None = None
        #: the newest checkpoint of this forward, a weak reference because autograd's graph owns it
        self._newest: weakref.ref[_Checkpoint] | None = None
        #: the checkpoint whose tensor the stream still copies to the host
        self._leaving: _Checkpoint | None = None

    def begin(self) -> None:
        """Begin a forward, whose backward fetches no checkpoint of an earlier forward."""
        self._newest = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A context in which tensors that autograd saves are kept on the host, but for empty tensors."""
        with saved_tensors_hooks(self._keep, self._back):
            yield

    def _keep(self, x: Tensor) -> Tensor | _Checkpoint:
        if not x.numel():  # torch's checkpoint saves an empty tensor in addition to the inputs
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
        # wait for the copy, in either direction, before anyone reads x or frees its memory
        self._copies.wait()
        if (before := kept.before) is not None and before.x is None:
            before.x = self._copies.to_device(before.host)
        return x


class SavedOnCpu(HostCheckpoints):
    """Keeps inputs in pinned memory as torch.autograd.graph.save_on_cpu(pin_memory=True) does: the computing
    stream copies an input away when its run begins, while the program waits, and copies the input back when
    backward asks for it; no input is fetched ahead."""

    def _keep(self, x: Tensor) -> Any:
        if not x.numel():
            return x
        host = host_copies.host_empty_like(x)
        host_copies.to_host_(host, x)
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
        """Copy the kept input ``host`` to x on the device."""
        host_copies.to_device_(x, host)


class PageableCheckpoints(SavedOnCpu):
    """Keeps inputs in pageable memory by ``tensor.to``, as ALST's checkpoint function does
    (``CheckpointFunctionWithCPUOffload`` of ArcticTraining) and DeepSpeed's (``checkpoint_in_cpu`` until
    0.19). The program also waits for the copies back.

    Args:
        angles: elements of a cos and of a sin that are copied to the host with each input, in vain, because
            Megatron-DeepSpeed has them among a run's arguments and still uses those on the device."""

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
            host_copies.to_pageable_(host_copies.pageable_empty_like(each), each)
            wait_for_device(each)
        host = host_copies.pageable_empty_like(x)
        host_copies.to_pageable_(host, x)
        wait_for_device(x)
        return host, x.device

    def _fill(self, x: Tensor, host: Tensor) -> None:
        host_copies.from_pageable_(x, host)
        wait_for_device(x)


def checkpoints_on_host(where: str, angles: int = 0) -> HostCheckpoints | None:
    """The keeper of layers' inputs for ``where``, a value of the option ``checkpoints``; None for "device".
    ``angles``: see :class:`PageableCheckpoints`."""
    if where == "pageable":
        return PageableCheckpoints(angles)
    return {"host": HostCheckpoints, "save_on_cpu": SavedOnCpu}[where]() if where != "device" else None
