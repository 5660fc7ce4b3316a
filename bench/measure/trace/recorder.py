"""The one observer of operators, which feeds the meters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.communication import CommunicationMeter, communication_of
from spbench.bench.measure.trace.event_log import EventLog
from spbench.bench.measure.trace.memory import HostMemoryMeter, MemoryMeter
from spbench.bench.measure.trace.meter import Call, Meter
from spbench.bench.measure.trace.recorded_streams import Streams, recorded_streams
from spbench.bench.measure.trace.torch_internals import FakeTensor, TorchDispatchMode, no_dispatch, replaced
from spbench.impls.axes import MESH_AXES
from spbench.impls.unlike_work import noting_work

PRIM_DEVICE = torch.ops.prim.device.default
BETWEEN_TWO = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
_NOTHING = torch.empty(0)


def group_axes(mesh: DeviceMesh | None) -> dict[str, str]:
    """The mesh axis of each process group of more than one rank, by the group's name."""
    if mesh is None:
        return {}
    groups = {axis: mesh.get_group(axis) for axis in MESH_AXES}
    return {group.group_name: axis for axis, group in groups.items() if group.size() > 1}


class Recorder(TorchDispatchMode):
    """While entered, every operator of this thread and of its backward passes through the meters.

    Args:
        mesh: the device mesh of the cell; None for a rank alone.
        settle_s: how long to wait after a collective, in seconds.
        events: note the order of events too, and what is waited for; on fake process groups only, whose
            communication has ended before it began.
        further: meters beside those of memory, communication and events.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        settle_s: float = 0.0,
        events: bool = False,
        further: Sequence[type[Meter]] = (),
    ):
        super().__init__()
        self.settle_s = settle_s
        self._unsettled = False
        self._paused = False
        self.communication = CommunicationMeter(group_axes(mesh))
        self.events = EventLog(mesh) if events else None
        self.streams = Streams(None) if self.events is None else self.events.streams
        self.host_memory = HostMemoryMeter(mesh)
        self.memory = MemoryMeter(mesh, self.host_memory, self.streams)
        self.further = [meter(mesh) for meter in further]
        core = [self.memory, self.host_memory, self.communication, self.events]
        self.meters: list[Meter] = [meter for meter in [*core, *self.further] if meter is not None]

    def __enter__(self) -> Recorder:
        with ExitStack() as undone_if_it_fails:
            entered: Recorder = super().__enter__()
            undone_if_it_fails.callback(super().__exit__, None, None, None)
            self._enter_patches(undone_if_it_fails)
            self._patches = undone_if_it_fails.pop_all()
        return entered

    def __exit__(self, *error: Any) -> None:
        self._patches.__exit__(*error)

    def _enter_patches(self, patches: ExitStack) -> None:
        """Put in place what is patched while the recorder is entered."""
        if self.memory in self.meters:
            # fully_shard frees and makes room for weights by resizing their storages, which is no operator
            patches.enter_context(replaced(torch.UntypedStorage, {"resize_": self._seen_resize()}))
            patches.enter_context(self.memory.modules.followed())
        if self.memory in self.meters or self.events is not None:
            patches.enter_context(recorded_streams(self.streams))
        if self.events is not None:
            patches.enter_context(self.events.counted_modules())
            patches.enter_context(noting_work(self.events.builder.work_of))

    def _seen_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """``UntypedStorage.resize_``, noted by the memory meter too."""
        recorder, resize = self, torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if not recorder._paused:
                recorder.memory.resized(storage)
            return result

        return resize_and_see

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens inside belongs to that phase of the step."""
        for meter in self.meters:
            meter.phase(name)
        yield

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """What happens inside is a traced step; before the ``last``, the memory meters alone see it."""
        of_memory: list[Meter] = [self.memory, self.host_memory]
        meters, self.meters = self.meters, self.meters if last else of_memory
        try:
            yield
        finally:
            self.meters = meters
            self.memory.end_step()
            self.host_memory.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not seen."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def found(self) -> dict[str, Mapping[str, Any]]:
        """What the further meters found, by their names."""
        return {meter.name: meter.found() for meter in self.further}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs a fifth of a trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is PRIM_DEVICE:  # half of all calls on fake tensors, and of no interest
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if self._unsettled:
            self._unsettled = False
            time.sleep(self.settle_s)
        # before it runs, for one whose bytes are not known would be left under way
        communication = communication_of(func, args)
        result = self._run(func, args, kwargs)
        if communication is not None:
            self._unsettled = self.settle_s > 0
            if self.events is not None:
                result = self.events.post(args, result, communication)
        call = Call(func, args, kwargs, result, communication)
        for meter in self.meters:
            meter.see(call)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in BETWEEN_TWO and isinstance(args[0][0], FakeTensor):
            # fake ranks look at no tensor, and fake tensors take ten times as long to be not looked at
            with no_dispatch():
                return func([_NOTHING], *args[1:], **kwargs)
        return func(*args, **kwargs)
