"""A recorder for fake tensors that remembers what operators do, instead of asking FakeTensorMode again.

What an operator returns on fake tensors, and what the event log writes down for it, depends only on the
operator and on the metadata of its arguments. A training step calls few distinct ones, layer after layer, and
each call costs FakeTensorMode some 200 us. So the first call of each takes the plain path of
:class:`Recorder`, and later ones build the same results directly. Whatever is unusual (:func:`_key` and
:func:`_remembered` say what) always takes the plain path. A test compares the traces event by event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spbench.bench.meters.communication import communicates
from spbench.bench.meters.event_log import PostedWork
from spbench.bench.meters.memory import MemoryMeter, makes_on_host
from spbench.bench.meters.meter import Call
from spbench.bench.meters.recorder import BETWEEN_TWO, PRIM_DEVICE, Recorder
from spbench.bench.meters.repeated_steps import RepeatedSteps
from spbench.bench.meters.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    fake_tensor,
    schema_of,
    storage_key,
)
from spbench.bench.simulator.program_builder import VIEW, KernelRow
from spbench.impls.keyed_steps import choosing_steps

_Path = tuple[int | str, ...]
_Key = tuple[Any, ...]

#: operators that change metadata or storage of an argument, or whose result depends on values
_UNUSUAL_TAGS = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.maybe_aliasing_or_mutating,
)
_UNUSUAL = frozenset(
    {"aten::resize_", "aten::set_", "aten::lift_fresh", "aten::lift", "aten::_local_scalar_dense"}
)
_PLAIN_SCALARS = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True)
class _Made:
    """The metadata of a result that the operator makes. ``view_of``: the argument in whose storage it lies
    from ``offset`` on; None: it has a storage of its own, contents unknown."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    attributes: Mapping[str, Any]
    view_of: _Path | None = None
    offset: int = 0


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument itself (operators in place, and ``out=``)."""

    path: _Path


@dataclass(frozen=True)
class _Remembered:
    """What an operator returned.

    Attributes:
        results: in order; None: it returned None.
        container: type of the returned tuple or list; None for a single tensor.
    """

    results: tuple[_Made | _Argument, ...] | None
    container: type | None


#: entries hold no tensor and no mode, so they serve every trace of the process; None: always the plain path
MEMORY: dict[_Key, _Remembered | None] = {}
#: a bound on the memory of a process that traces very many shapes
MOST_ENTRIES = 500_000


#: collectives that return what they were given to fill, and their work
_IN_PLACE = (
    torch.ops.c10d._allgather_base_.default,
    torch.ops.c10d._reduce_scatter_base_.default,
    torch.ops.c10d.allreduce_.default,
)


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
        # a transfer between fake ranks has ended before it began
        self._ended = PostedWork(lambda event: None, -1)
        #: what the event log writes for a call within the step; None: nothing
        self._rows: dict[_Key, KernelRow | None] = {}

    def _enter_patches(self, patches: ExitStack) -> None:
        super()._enter_patches(patches)
        steps = RepeatedSteps([self.memory, self.host_memory], self.communication, self.events)
        patches.enter_context(choosing_steps(steps))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is PRIM_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        key = None if self._paused else _key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if (remembered := MEMORY.get(key)) is not None:
            on_host = makes_on_host(func)
            result = self._build(remembered, args, kwargs, self.host_memory if on_host else self.memory)
            if on_host:
                self.host_memory.tag_made(func, result)
            self.memory.note_inside(func, args)
            if self.events is not None and self.events.running:
                self._write_row(key, func, args, kwargs, result)
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key not in MEMORY and len(MEMORY) < MOST_ENTRIES:
            MEMORY[key] = _remembered(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in BETWEEN_TWO and isinstance(args[0][0], FakeTensor):
            return self._ended.boxed()  # the fake group would do nothing
        if func in _IN_PLACE and isinstance(args[0][0] if isinstance(args[0], list) else args[0], FakeTensor):
            return args[0], self._ended.boxed()
        return super()._run(func, args, kwargs)

    def _write_row(
        self, key: _Key, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Write down in the event log what it wrote for the first such call of this trace."""
        assert self.events is not None
        builder = self.events.builder
        if key in self._rows:
            self.events.count_node()
            if (row := self._rows[key]) is not None:
                builder.add_kernel(row)
            else:
                builder.host_work += VIEW
            return
        written = len(builder.rows)
        self.events.see(Call(func, args, kwargs, result))
        self._rows[key] = builder.rows[written][:-2] if len(builder.rows) > written else None

    def _build(
        self, remembered: _Remembered, args: Sequence[Any], kwargs: Mapping[str, Any], meter: MemoryMeter
    ) -> Any:
        """The results again, new storages noted by that meter."""
        if remembered.results is None:
            return None
        results = [self._result(each, args, kwargs, meter) for each in remembered.results]
        return results[0] if remembered.container is None else remembered.container(results)

    def _result(
        self,
        remembered: _Made | _Argument,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        meter: MemoryMeter,
    ) -> Tensor:
        if isinstance(remembered, _Argument):
            argument: Tensor = _at(remembered.path, args, kwargs)
            return argument
        made, path = remembered, remembered.view_of
        storage = None if path is None else _at(path, args, kwargs).untyped_storage()
        fake = fake_tensor(
            self.mode, made.shape, made.stride, made.dtype, made.device, made.attributes, storage, made.offset
        )
        if path is None:
            meter.note(fake)
        return fake


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> _Key | None:
    """All that the results of a call depend on; None where that is not known to be the metadata of plain fake
    tensors and the values of plain scalars."""
    key: list[Any] = [func, torch.get_default_dtype()]
    for value in args:
        if not _describe(value, key):
            return None
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            if not _describe(value, key):
                return None
    return tuple(key)


def _describe(value: Any, key: list[Any]) -> bool:
    """Append what a call depends on of one argument; returns whether that is known."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.dtype.is_complex:
            return False
        # read at every call: an assignment to x.data changes a tensor under its identity
        key += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
        return True
    if kind in _PLAIN_SCALARS:
        key += (kind, value)
        return True
    if kind is list or kind is tuple or kind is torch.Size:
        key += (list, len(value))
        return all(_describe(item, key) for item in value)
    return False


def _remembered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Remembered | None:
    """What is to be built at the next call with this key; None where it must take the plain path."""
    if communicates(func) or schema_of(func).name in _UNUSUAL or any(t in func.tags for t in _UNUSUAL_TAGS):
        return None
    if result is None:
        return _Remembered(None, None)
    several = type(result) in (tuple, list)
    arguments = dict(_tensors((), args, kwargs))
    # an argument on each storage; None: the storage is that of an earlier result
    storages: dict[int, _Path | None] = {storage_key(x): path for path, x in arguments.items()}
    results: list[_Made | _Argument] = []
    for x in result if several else [result]:
        if type(x) is not FakeTensor or x.constant is not None:
            return None
        same = next((path for path, argument in arguments.items() if argument is x), None)
        if same is not None:
            results.append(_Argument(same))
            continue
        path, offset = storages.get(storage_key(x)), int(x.storage_offset())
        if path is None:
            if offset or x.untyped_storage().nbytes() != _dense_bytes(x) or storage_key(x) in storages:
                return None
            storages[storage_key(x)] = None
        attributes = {name: value for name, value in x.__dict__.items() if name != "fake_mode"}
        results.append(_Made(tuple(x.shape), x.stride(), x.dtype, x.fake_device, attributes, path, offset))
    return _Remembered(tuple(results), type(result) if several else None)


def _dense_bytes(x: Tensor) -> int:
    """Bytes of the storage that ``empty_strided`` makes for the shape and strides of x."""
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _tensors(path: _Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Path, Tensor]]:
    """The tensors among the arguments, with the path to each: positions in lists, names of keywords."""
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for step, value in items:
        if isinstance(value, Tensor):
            yield (*path, step), value
        elif isinstance(value, (list, tuple)):
            yield from _tensors((*path, step), value, {})


def _at(path: _Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at a path of :func:`_tensors`."""
    first, *rest = path
    argument = kwargs[first] if isinstance(first, str) else args[first]
    for step in rest:
        argument = argument[step]
    return argument
