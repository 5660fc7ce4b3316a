"""A recorder for fake tensors that remembers what operators do, instead of asking FakeTensorMode again.

What an operator returns on fake tensors, and what the event log writes down for it, depends only on the
operator and on the metadata of its arguments. A training step calls few distinct ones, layer after layer, and
each call costs FakeTensorMode some 200 us. So the first call of each takes the plain path of
:class:`Recorder`, unless it is known otherwise what it returns (:func:`worked_out`), and later ones build the
same results directly. Whatever is unusual (:func:`key_of` and :func:`described` say what) always takes the
plain path. A test compares the traces event by event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from spbench.bench.measure.simulator.program_builder import VIEW, KernelRow
from spbench.bench.measure.trace.event_log import PostedWork
from spbench.bench.measure.trace.memory import MemoryMeter, makes_on_host
from spbench.bench.measure.trace.meter import Call
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
from spbench.bench.measure.trace.recorder import BETWEEN_TWO, PRIM_DEVICE, Recorder
from spbench.bench.measure.trace.repeated_steps import RepeatedSteps
from spbench.bench.measure.trace.torch_internals import FakeTensor, FakeTensorMode, fake_tensor, fake_views
from spbench.bench.measure.trace.uncut_pieces import nothing_cut
from spbench.impls.keyed_steps import choosing_steps

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


def _remember(key: Key, found: Remembered | None) -> None:
    if len(MEMORY) < MOST_ENTRIES:
        MEMORY[key] = found


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
        patches.enter_context(nothing_cut())

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

    def _known(
        self, key: Key, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Remembered | None:
        """What a call returns; None: the plain path has to say."""
        found = MEMORY.get(key, _NEVER_SEEN)  # asked once, for long keys take long to hash
        if found is not _NEVER_SEEN:
            return found
        if (found := worked_out(func, args, kwargs, self._attributes)) is not None:
            _remember(key, found)
        return found

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in BETWEEN_TWO and isinstance(args[0][0], FakeTensor):
            return self._ended.boxed()  # the fake group would do nothing
        if func in _IN_PLACE and isinstance(args[0][0] if isinstance(args[0], list) else args[0], FakeTensor):
            return args[0], self._ended.boxed()
        return super()._run(func, args, kwargs)

    def _write_row(
        self,
        remembered: Remembered,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Write down in the event log what it wrote for the first such call of this trace."""
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
        """The results again, new storages noted by that meter."""
        if remembered.results is None:
            return None
        results: Sequence[Tensor]
        if (views := remembered.views) is not None:
            results = fake_views(
                argument_at(views.of, args, kwargs), views.dtype, views.places, views.attributes
            )
        else:
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
