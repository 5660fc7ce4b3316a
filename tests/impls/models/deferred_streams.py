"""A device that copies as late as its streams allow, and shows where one copies too early or too late.

Operators of the compute stream run at once, in the order of the program. What is issued on another stream is
put off until some stream waits for it, and then finds memory as it is by then. So it sees what a device may
do between two points that nothing orders: a result that is used before it was waited for is not there yet,
and memory that was given back in between is another tensor's.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {torch.ops.spbench.to_host_.default, torch.ops.spbench.to_device_.default}


class Device(TorchDispatchMode):
    """While entered, ``torch.cpu`` has the streams of this device.

    Attributes:
        faults: what went wrong, in order.
        copied: how many copies were made.
        deaf: the streams that ignore what they are told to wait for, to plant that fault.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.faults: list[str] = []
        self.copied = 0
        self.deaf: set[str] = set()
        self.operators = 0
        self.streams: list[DeferredStream] = []
        self.compute = self.current = DeferredStream(self, "compute")
        ours = {
            "Stream": lambda priority=-1: DeferredStream(self, "copies"),
            "Event": lambda *_, **__: DeferredEvent(self),
            "current_stream": lambda device=None: self.current,
            "stream": self.issuing,
            "synchronize": lambda device=None: self.finish(),
        }
        for name, made in ours.items():
            monkeypatch.setattr(torch.cpu, name, made)

    def finish(self) -> None:
        """The host waits until all that was put off is done."""
        for stream in self.streams:
            stream.reach(stream.issued)

    @contextmanager
    def issuing(self, stream: DeferredStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is self.compute:
            self.operators += 1
            return func(*args, **(kwargs or {}))
        if func not in COPIES:
            self.faults.append(f"{func} on {self.current.name}")
            return func(*args, **(kwargs or {}))
        self.current.put_off(func.__name__, *args)
        return None


class _Later:
    """A tensor that a copy will read or write: its memory is no longer its own once nothing holds it."""

    def __init__(self, x: Tensor):
        self._storage = weakref.ref(x.untyped_storage())
        self._metadata = x.dtype, x.storage_offset(), x.shape, x.stride()

    def now(self) -> Tensor | None:
        if (storage := self._storage()) is None:
            return None
        dtype, *place = self._metadata
        return torch.empty(0, dtype=dtype).set_(storage, *place)


class DeferredStream:
    """A stream; that which computes has never anything put off."""

    def __init__(self, device: Device, name: str):
        self.device, self.name = device, name
        device.streams.append(self)
        self._queue: deque[tuple[str, _Later, _Later, bool]] = deque()
        self.issued = 0
        #: of the device, when this stream last waited for the compute stream
        self._seen = -1

    def put_off(self, name: str, target: Tensor, source: Tensor) -> None:
        in_order = self._seen == self.device.operators
        self._queue.append((name, _Later(target), _Later(source), in_order))
        self.issued += 1

    def reach(self, point: int) -> None:
        """Do what was issued before a point."""
        device = self.device
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            while self._queue and self.issued - len(self._queue) < point:
                name, *both, in_order = self._queue.popleft()
                target, source = (each.now() for each in both)
                if target is None or source is None:
                    device.faults.append(f"{name}: its memory was given back")
                    continue
                if not in_order:
                    device.faults.append(f"{name}: not after what the compute stream had been given")
                device.copied += 1
                target.copy_(source if in_order else torch.full_like(source, torch.nan))

    def record_event(self, event: DeferredEvent | None = None) -> DeferredEvent:
        event = event or DeferredEvent(self.device)
        event.record(self)
        return event

    def wait_event(self, event: DeferredEvent) -> None:
        if self.name in self.device.deaf or event.stream is None:
            return
        if event.stream is self.device.compute:
            self._seen = max(self._seen, event.point)
        else:
            event.stream.reach(event.point)

    def wait_stream(self, stream: DeferredStream) -> None:
        self.wait_event(stream.record_event())


class DeferredEvent:
    """A point of a stream."""

    def __init__(self, device: Device):
        self.device, self.point = device, 0
        self.stream: DeferredStream | None = None

    def record(self, stream: DeferredStream | None = None) -> None:
        self.stream = stream or self.device.current
        computes = self.stream is self.device.compute
        self.point = self.device.operators if computes else self.stream.issued

    def synchronize(self) -> None:
        """The host waits for the point."""
        if self.stream is not None:
            self.stream.reach(self.point)

    def wait(self, stream: DeferredStream | None = None) -> None:
        (stream or self.device.current).wait_event(self)
