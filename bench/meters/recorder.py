"""The one observer of operators, which feeds the meters."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.meters.communication import FILLED_FROM_OTHERS, CommunicationMeter
from spbench.bench.meters.event_log import TimelineMeter
from spbench.bench.meters.memory import MemoryMeter

#: where operators that communicate live: c10d, and what DTensor and torch.compile use in its place
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
_DEVICE = torch.ops.prim.device.default
_BETWEEN_TWO = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
_NOTHING = torch.empty(0)


class Recorder(TorchDispatchMode):
    """While entered, every operator of this thread and of its backward passes through the meters.

    Args:
        axes: the mesh axis of each process group, by the group's name.
        settle_s: how long to wait after a collective, in seconds.
        timeline: notes the order of events too, and sees what is waited for; on fake process groups only,
            whose communication has ended before it began.
    """

    def __init__(self, axes: Mapping[str, str], settle_s: float = 0.0, timeline: TimelineMeter | None = None):
        super().__init__()
        self.settle_s = settle_s
        self._unsettled = False
        self._paused = False
        self.memory = MemoryMeter()
        self.communication = CommunicationMeter(axes)
        self.timeline = timeline

    def __enter__(self) -> Recorder:
        # fully_shard frees and makes room for weights by resizing their storages, which is no operator
        self._resize = torch.UntypedStorage.resize_
        meter, resize = self, self._resize

        def resize_and_see(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if not meter._paused:
                meter.memory.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[method-assign,assignment]
        entered: Recorder = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to that phase of the step."""
        self.memory.mark(name)
        self.communication.phase = name
        if self.timeline is not None:
            self.timeline.mark(name)
        yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not seen."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a fifth of a trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func is _DEVICE:  # half of all calls on fake tensors, and of no interest
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self._unsettled:
            self._unsettled = False
            time.sleep(self.settle_s)
        communicates = func.namespace in _COMMUNICATING
        # before it runs, for one that the meter refuses would be left under way
        seen = self.communication.see(func, args) if communicates else None
        result = self._run(func, args, kwargs or {})
        if seen is not None:
            self._unsettled = self.settle_s > 0
            if func._schema.name.endswith(FILLED_FROM_OTHERS):
                self._tag_buffers(args[0])
            if self.timeline is not None:
                return self.timeline.see_communication(func, args, result, seen)
            return result
        if self.timeline is not None:
            self.timeline.see(func, args, kwargs, result)
        if isinstance(result, Tensor):
            self.memory.see(result)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, Tensor):
                    self.memory.see(item)
        return result

    @staticmethod
    def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _BETWEEN_TWO and isinstance(args[0][0], FakeTensor):
            # fake ranks look at no tensor, and fake tensors take ten times as long to be not looked at
            with no_dispatch():
                return func([_NOTHING], *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _tag_buffers(self, filled: Any) -> None:
        tensors = [filled] if isinstance(filled, Tensor) else filled
        for tensor in tensors:
            nested = tensor if isinstance(tensor, (tuple, list)) else [tensor]
            self.memory.tag(nested, "communication_buffers", keep=True)
