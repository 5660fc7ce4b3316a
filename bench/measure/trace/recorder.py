"""Recorders, which see every operator and feed the meters: a plain one, and a fast one for fake tensors.

The results of an operator on fake tensors depend only on the operator and on the metadata of its arguments. A
training step has few distinct calls, layer after layer, and each call costs FakeTensorMode some 200 us. So
the fast recorder lets the mode run the first of equal calls, unless :func:`worked_out` gives its results, and
builds the results of later calls itself. The mode always runs unusual calls (see :func:`key_of` and
:func:`described`). A test compares the traces of both recorders event by event.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    _GeneratorContextManager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace import operator_results, torch_internals
from spbench.bench.measure.trace.event_log import EventLog, PostedWork, Streams, recorded_streams
from spbench.bench.measure.trace.memory import HostMemoryMeter, MemoryMeter
from spbench.bench.measure.trace.meter import (
    Call,
    CommunicationMeter,
    Made,
    Meter,
    OperatorArgument,
    Remembered,
    communication_of,
    group_axes,
)
from spbench.bench.measure.trace.repeated_steps import RepeatedSteps
from spbench.impls import choosing_steps, noting_host_work, noting_work

PRIM_DEVICE = torch.ops.prim.device.default
BETWEEN_TWO = (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
#: operators that return a view in another shape; FakeTensorMode may put a view without elements on a storage
#: of its own, which is mended here
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class Recorder(torch_internals.TorchDispatchMode):
    """While entered, every operator of this thread and of its backward passes through the meters.

    Args:
        mesh: the device mesh of the cell; None for a rank alone.
        settle_s: seconds to wait after a collective.
        events: whether to record the program (events and waits) too; only on fake process groups, whose
            communication ends at once.
        further: meters in addition to those of memory, communication and events.
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
        # the Work of communication between fake ranks, which has always ended
        self._ended = PostedWork(lambda event: None, -1)
        self.communication = CommunicationMeter(group_axes(mesh))
        self.events = EventLog(mesh) if events else None
        self.streams = Streams(None) if self.events is None else self.events.streams
        self.host_memory = HostMemoryMeter(mesh)
        self.memory = MemoryMeter(mesh, self.host_memory, self.streams)
        self.further = [meter(mesh) for meter in further]
        core = [self.memory, self.host_memory, self.communication, self.events]
        self.meters: list[Meter] = [meter for meter in [*core, *self.further] if meter is not None]

    def __enter__(self) -> Self:
        with ExitStack() as undone_if_it_fails:
            entered: Self = super().__enter__()
            undone_if_it_fails.callback(super().__exit__, None, None, None)
            self._enter_patches(undone_if_it_fails)
            self._patches = undone_if_it_fails.pop_all()
        return entered

    def __exit__(self, *error: Any) -> None:
        self._patches.__exit__(*error)

    def _enter_patches(self, patches: ExitStack) -> None:
        """Enter the patches of torch that last while the recorder is entered."""
        if self.memory in self.meters:
            # fully_shard frees and makes room for weights by resizing their storages, which is no operator
            patches.enter_context(
                torch_internals.replaced(torch.UntypedStorage, {"resize_": self._seen_resize()})
            )
            call = partial(self._call_module, nn.Module.__call__)
            called = {"__call__": lambda module, *args, **kwargs: call(module, *args, **kwargs)}  # a method
            patches.enter_context(torch_internals.replaced(nn.Module, called))
        if self.memory in self.meters or self.events is not None:
            patches.enter_context(recorded_streams(self.streams))
        if self.events is not None:
            patches.enter_context(noting_work(self.events.builder.work_of))
            patches.enter_context(noting_host_work(self.events.count_calls))

    def _call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module by ``call``; the call is the host's work, and storages get the module's place."""
        if self.events is not None:
            self.events.count_calls(1)
        with self.memory.modules.within(module):
            return call(module, *args, **kwargs)

    def _seen_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """A version of ``UntypedStorage.resize_`` that reports to the memory meter."""
        recorder, resize = self, torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            if not recorder._paused:
                recorder.memory.resized(storage)
            return result

        return resize_and_see

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within the context, all operators belong to the phase ``name`` of the step."""
        for meter in self.meters:
            meter.phase(name)
        yield

    @contextmanager
    def step(self, *, last: bool) -> Iterator[None]:
        """The context of a traced step. In steps before the ``last``, only memory meters see operators."""
        try:
            with nullcontext() if last else self._metering_memory():
                yield
        finally:
            self.memory.end_step()
            self.host_memory.end_step()

    def _metering_memory(self) -> AbstractContextManager[None]:
        """A context in which only memory meters see operators."""
        return torch_internals.replaced(self, {"meters": [self.memory, self.host_memory]})

    def paused(self) -> _GeneratorContextManager[None]:
        """A context in which no meter sees any operator."""
        return torch_internals.replaced(self, {"_paused": True})

    def found(self) -> dict[str, Mapping[str, Any]]:
        """The results of the further meters, by the meter's name."""
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
            return args[0].fake_device if isinstance(args[0], torch_internals.FakeTensor) else func(*args)
        if self._unsettled:
            self._unsettled = False
            time.sleep(self.settle_s)
        # before the call, because an operator of unknown bytes raises, and must not leave a message under way
        communication = communication_of(func, args)
        if communication is None or communication.returns_new or not _is_fake(args[0]):
            result, remembered = self._run(func, args, kwargs)
        else:  # fake ranks read no tensor, and the mode takes ten times as long to say so
            work = self._ended.boxed()
            result, remembered = work if len(func._schema.returns) == 1 else (args[0], work), None
        if communication is not None:
            self._unsettled = self.settle_s > 0
            if self.events is not None:
                result = self.events.post(args, result, communication)
        call = Call(func, args, kwargs, result, communication, remembered)
        for meter in self.meters:
            meter.see(call)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Remembered | None]:
        """Run an operator; returns its result, and the description from which it was built, if it was."""
        result = func(*args, **kwargs)
        if func in _RESHAPES and isinstance(result, torch_internals.FakeTensor) and not result.numel():
            with torch_internals.no_dispatch():
                result.set_(args[0].untyped_storage(), result.storage_offset(), result.shape, result.stride())
        return result, None


def _is_fake(argument: Any) -> bool:
    """Whether the first tensor of a collective's argument is a fake tensor."""
    while isinstance(argument, list):
        argument = argument[0]
    return isinstance(argument, torch_internals.FakeTensor)


#: results by key; None: the mode always runs such a call. Entries hold no tensor, so that all traces of a
#: process share them
MEMORY: dict[operator_results.Key, Remembered | None] = {}
#: the most entries, which bounds the memory of a process that traces very many shapes
MOST_ENTRIES = 500_000
_NEVER_SEEN = Remembered(None, None)


class FastRecorder(Recorder):
    """A :class:`Recorder` for fake tensors of one mode, which builds results of equal calls itself, and runs
    only some of a loop's like steps (:class:`RepeatedSteps`).

    Args:
        mode: the FakeTensorMode that is entered around this recorder.
        mesh, events: as for :class:`Recorder`. There are no further meters, since those must see every call.
    """

    def __init__(self, mode: torch_internals.FakeTensorMode, mesh: Any = None, events: bool = False):
        super().__init__(mesh, events=events)
        self.mode = mode
        with mode:
            some = torch.empty(0)
        #: the attributes of a fake tensor of the mode
        self._attributes = {name: value for name, value in vars(some).items() if name != "fake_mode"}

    def _enter_patches(self, patches: ExitStack) -> None:
        super()._enter_patches(patches)
        steps = RepeatedSteps([self.memory, self.host_memory], self.communication, self.events)
        patches.enter_context(choosing_steps(steps))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Remembered | None]:
        key = operator_results.key_of(func, args, kwargs)
        # looked up once, since long keys take long to hash
        remembered = None if key is None else MEMORY.get(key, _NEVER_SEEN)
        is_new = remembered is _NEVER_SEEN
        if is_new:
            remembered = operator_results.worked_out(func, args, kwargs, self._attributes)
        result = (
            super()._run(func, args, kwargs)[0]
            if remembered is None
            else self._build(remembered, args, kwargs)
        )
        if key is not None and is_new and len(MEMORY) < MOST_ENTRIES:
            MEMORY[key] = remembered or operator_results.described(func, args, kwargs, result)
        return result, remembered

    def _build(self, remembered: Remembered, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Build results by their description, for these arguments."""
        if remembered.results is None:
            return None
        results = [self._result(each, args, kwargs) for each in remembered.results]
        return results[0] if remembered.container is None else remembered.container(results)

    def _result(
        self, made: Made | OperatorArgument, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        if isinstance(made, OperatorArgument):
            argument: Tensor = operator_results.argument_at(made.path, args, kwargs)
            return argument
        path = made.view_of
        storage = None if path is None else operator_results.argument_at(path, args, kwargs).untyped_storage()
        return torch_internals.fake_tensor(
            self.mode, made.shape, made.stride, made.dtype, made.device, made.attributes, storage, made.offset
        )
