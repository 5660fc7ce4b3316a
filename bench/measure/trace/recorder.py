"""The one observer of operators, which feeds the meters.

A recorder for fake tensors that remembers what operators do, instead of asking FakeTensorMode again.

What an operator returns on fake tensors, and what the event log writes down for it, depends only on the
operator and on the metadata of its arguments. A training step calls few distinct ones, layer after layer, and
each call costs FakeTensorMode some 200 us. So the first call of each takes the plain path of
:class:`Recorder`, unless it is known otherwise what it returns (:func:`worked_out`), and later ones build the
same results directly. Whatever is unusual (:func:`key_of` and :func:`described` say what) always takes the
plain path. A test compares the traces event by event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.simulator.program_builder import VIEW, KernelRow
from spbench.bench.measure.trace.event_log import EventLog, PostedWork, Streams, recorded_streams
from spbench.bench.measure.trace.memory import HostMemoryMeter, MemoryMeter, makes_on_host
from spbench.bench.measure.trace.meter import Call, CommunicationMeter, Meter, communication_of, group_axes
from spbench.bench.measure.trace.operator_results import (
    Key,
    Made,
    OperatorArgument,
    Remembered,
    argument_at,
    described,
    key_of,
    worked_out,
)
from spbench.bench.measure.trace.repeated_steps import RepeatedSteps, nothing_cut
from spbench.bench.measure.trace.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_tensor,
    no_dispatch,
    replaced,
)
from spbench.impls import choosing_steps, noting_work

PRIM_DEVICE = torch.ops.prim.device.default
BETWEEN_TWO = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
_NOTHING = torch.empty(0)
#: what has its result in another shape where it lies; of no elements FakeTensorMode, which keeps what
#: as_strided returned inside, may put it on a storage of its own
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


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
        """Inside, all that happens belongs to that phase of the step."""
        for meter in self.meters:
            meter.phase(name)
        yield

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """Inside is a traced step; before the ``last`` step, only the memory meters see operators."""
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
        """Inside, no meter sees any operator."""
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
        result = func(*args, **kwargs)
        if func in _RESHAPES and isinstance(result, FakeTensor) and not result.numel():
            with no_dispatch():
                result.set_(args[0].untyped_storage(), result.storage_offset(), result.shape, result.stride())
        return result


#: entries hold no tensor and no mode, so they serve every trace of the process; None: always the plain path
MEMORY: dict[Key, Remembered | None] = {}
#: a bound on the memory of a process that traces very many shapes
MOST_ENTRIES = 500_000
_NEVER_SEEN = Remembered(None, None)

#: collectives that return what they were given to fill, and their work
_IN_PLACE = (
    torch.ops.c10d._allgather_base_.default,
    torch.ops.c10d._reduce_scatter_base_.default,
    torch.ops.c10d.allreduce_.default,
)
#: and those that return their work alone
_WORK_ALONE = (*BETWEEN_TWO, torch.ops.c10d.alltoall_base_.default)


def _remember(key: Key, remembered: Remembered | None) -> None:
    if len(MEMORY) < MOST_ENTRIES:
        MEMORY[key] = remembered


class FastRecorder(Recorder):
    """As :class:`Recorder`, on fake tensors of one mode; of the steps of a ring that are alike only some are
    run (:class:`RepeatedSteps`).

    Args:
        mode: the mode that is entered around this one.
        mesh, events: as for :class:`Recorder`. There are no further meters: these see every call.
    """

    def __init__(self, mode: FakeTensorMode, mesh: Any = None, events: bool = False):
        super().__init__(mesh, events=events)
        self.mode = mode
        with mode:
            some = torch.empty(0)
        #: of tensors as the mode makes them
        self._attributes = {name: value for name, value in vars(some).items() if name != "fake_mode"}
        # a transfer between fake ranks has ended before it began
        self._ended = PostedWork(lambda event: None, -1)
        #: what the event log writes for such a call within the step; None: nothing
        self._rows: dict[Remembered, KernelRow | None] = {}

    def _enter_patches(self, patches: ExitStack) -> None:
        super()._enter_patches(patches)
        steps = RepeatedSteps([self.memory, self.host_memory], self.communication, self.events)
        patches.enter_context(choosing_steps(steps))
        patches.enter_context(nothing_cut(self._count_views))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is PRIM_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        key = None if self._paused else key_of(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if (remembered := self._known(key, func, args, kwargs)) is not None:
            on_host = makes_on_host(func)
            result = self._build(remembered, args, kwargs, self.host_memory if on_host else self.memory)
            if on_host:
                self.host_memory.tag_made(func, result)
            self.memory.note_inside(func, args)
            if self.events is not None and self.events.running:
                self._write_row(remembered, func, args, kwargs, result)
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in MEMORY:
            _remember(key, described(func, args, kwargs, result))
        return result

    def _count_views(self, number: int) -> None:
        """Note views that a node of autograd would have taken."""
        if number and self.events is not None and self.events.running:
            self.events.count_node()
            self.events.builder.host_work += number * VIEW

    def _known(
        self, key: Key, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Remembered | None:
        """The remembered results of such a call; None: the plain path has to work them out."""
        remembered = MEMORY.get(key, _NEVER_SEEN)  # asked once, for long keys take long to hash
        if remembered is not _NEVER_SEEN:
            return remembered
        if (remembered := worked_out(func, args, kwargs, self._attributes)) is not None:
            _remember(key, remembered)
        return remembered

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _WORK_ALONE or func in _IN_PLACE:
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if isinstance(first, FakeTensor):  # the fake group would do nothing
                ended = self._ended.boxed()
                return ended if func in _WORK_ALONE else (args[0], ended)
        return super()._run(func, args, kwargs)

    def _write_row(
        self,
        remembered: Remembered,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Write into the event log the same row as for the first such call of this trace."""
        assert self.events is not None
        builder = self.events.builder
        if remembered in self._rows:
            self.events.count_node()
            if (row := self._rows[remembered]) is not None:
                builder.add_kernel(row)
            else:
                builder.host_work += VIEW
            return
        written = len(builder.rows)
        self.events.see(Call(func, args, kwargs, result))
        self._rows[remembered] = builder.rows[written][:-2] if len(builder.rows) > written else None

    def _build(
        self, remembered: Remembered, args: Sequence[Any], kwargs: Mapping[str, Any], meter: MemoryMeter
    ) -> Any:
        """Make the remembered results again for these arguments; ``meter`` notes new storages."""
        if remembered.results is None:
            return None
        results = [self._result(each, args, kwargs, meter) for each in remembered.results]
        return results[0] if remembered.container is None else remembered.container(results)

    def _result(
        self,
        remembered: Made | OperatorArgument,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        meter: MemoryMeter,
    ) -> Tensor:
        if isinstance(remembered, OperatorArgument):
            argument: Tensor = argument_at(remembered.path, args, kwargs)
            return argument
        made, path = remembered, remembered.view_of
        storage = None if path is None else argument_at(path, args, kwargs).untyped_storage()
        fake = fake_tensor(
            self.mode, made.shape, made.stride, made.dtype, made.device, made.attributes, storage, made.offset
        )
        if path is None:
            meter.note(fake)
        return fake
