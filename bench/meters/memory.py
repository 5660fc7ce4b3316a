"""The memory meter: every storage's birth and death, and what they add up to.

The meter sees tensors, not an allocator, so it counts the same on fake tensors and on real ones.
:mod:`spbench.bench.meters.allocator` has the blocks that a card's allocator gives out for the same events.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.meters.allocator import rounded
from spbench.bench.meters.meter import Call, Meter
from spbench.bench.meters.module_calls import ModuleCalls
from spbench.bench.meters.torch_internals import (
    beyond_64_bits,
    in_backward,
    is_traceable_wrapper_subclass,
    schema_of,
    storage_key,
)
from spbench.impls.kernels.projection import TORCH_PRODUCTS, TRANSFORMER_ENGINE_PRODUCTS

CATEGORIES = (
    *("parameters", "gradients", "optimizer_state", "inputs", "activations"),
    *("communication_buffers", "workspaces", "temporaries"),
)


@dataclass
class MemoryLog:
    """What happened, in order.

    Attributes:
        sizes: bytes of each storage, by its number.
        events: number + 1 where a storage is born, -(number + 1) where it dies.
        marks: (phase, index of its first event) in order.
        tags: the category of storages that are known from outside.
        ends: the first event after each traced step, in order; empty: the log is of one step, to its end.
        workspaces: the libraries' workspaces among the storages, by their names in a cluster's file. Their
            size is that of the library on a card, see :meth:`with_workspaces`; until then it is 0.
        places: of each storage, the number in ``place_names`` of the module in whose forward or backward it
            was made (see :class:`ModuleCalls`); empty: not known.
    """

    sizes: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    tags: dict[int, str] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    workspaces: dict[int, str] = field(default_factory=dict)
    places: list[int] = field(default_factory=list, compare=False)
    place_names: list[str] = field(default_factory=list, compare=False)

    def with_workspaces(self, nbytes: Mapping[str, int]) -> MemoryLog:
        """The same log with workspaces of these sizes by name; one that is not named has none."""
        sizes = [*self.sizes]
        for number, name in self.workspaces.items():
            sizes[number] = nbytes.get(name, 0)
        return replace(self, sizes=sizes)

    def signed_bytes(self, sizes: np.ndarray | None = None) -> np.ndarray:
        """The change of allocated bytes at each event, in whole granules; ``sizes`` replaces the recorded."""
        events = np.asarray(self.events, dtype=np.int64)
        whole = rounded(np.asarray(self.sizes, dtype=np.int64) if sizes is None else sizes)
        return np.sign(events) * whole[np.abs(events) - 1]

    def spans(self) -> list[tuple[str, slice]]:
        """The phases in order, each with its events; forward and backward once a micro-batch."""
        starts = [*(start for _, start in self.marks), len(self.events)]
        return [(name, slice(start, end)) for (name, start), end in zip(self.marks, starts[1:], strict=True)]

    @property
    def step_start(self) -> int:
        """The first event of the first traced step; what came before is set-up."""
        return self.marks[0][1] if self.marks else 0

    @property
    def step_ends(self) -> list[int]:
        """The first event after each traced step."""
        return self.ends or [len(self.events)]

    def step_of(self, event: int) -> int:
        """The number, from 1, of the traced step that an event belongs to; 0: to set-up."""
        return 0 if event < self.step_start else bisect_right(self.step_ends[:-1], event) + 1

    def phase_of(self, event: int) -> str:
        """The phase that an event belongs to; "": it is before the first."""
        return next((name for name, first in reversed(self.marks) if first <= event), "")

    def born_before_step(self) -> list[bool]:
        """For each storage, in the order of their numbers: whether it was made before the first phase."""
        made = sum(event > 0 for event in self.events[: self.step_start])
        return [number < made for number in range(len(self.sizes))]

    def peak(self) -> Peak:
        """The largest sum of live bytes over the traced steps, in whole granules: what an allocator that
        splits every block would count."""
        return max(self.peaks(rounded(np.asarray(self.sizes, dtype=np.int64))), key=lambda peak: peak.nbytes)

    def peaks(self, nbytes: Sequence[int] | np.ndarray) -> list[Peak]:
        """Of each traced step the largest sum of live bytes, when it was, and what held it.

        Args:
            nbytes: of each storage, by its number, as an allocator counts it.

        Raises:
            Unsupported: a sum does not fit in 64 bits.
        """
        events, nbytes = np.asarray(self.events, dtype=np.int64), np.asarray(nbytes, dtype=np.int64)
        live = np.cumsum(np.sign(events) * nbytes[np.abs(events) - 1])
        if live.min(initial=0) < 0:  # where it goes beyond, it goes on from below
            raise beyond_64_bits("what is alive at once has")
        categories, peaks = np.asarray(self._categories()), []
        for start, end in pairwise([self.step_start, *self.step_ends]):
            at = start + int(np.argmax(live[start:end]))
            until = events[: at + 1]
            alive = np.zeros(len(self.sizes), dtype=bool)
            alive[until[until > 0] - 1] = True
            alive[-until[until < 0] - 1] = False  # each storage is born once and dies once, after that
            held = {name: int(nbytes[alive & (categories == name)].sum()) for name in CATEGORIES}
            peaks.append(Peak(int(live[at]), self.phase_of(at), held, int(live[end - 1])))
        return peaks

    def _categories(self) -> list[str]:
        """Of each storage: its tag; else activation if forward made it and left it alive; else temporary."""
        kept: set[int] = set()
        for name, span in self.spans():
            if name == "forward":
                events = self.events[span]
                born = {event - 1 for event in events if event > 0}
                kept |= born - {-event - 1 for event in events if event < 0}
        return [
            self.tags.get(number, "activations" if number in kept else "temporaries")
            for number in range(len(self.sizes))
        ]


@dataclass(frozen=True)
class Peak:
    """The memory of a step.

    Attributes:
        nbytes: the largest sum of live bytes.
        phase: in which it falls.
        held: bytes of each category then.
        at_end: live bytes at the end of the step.
    """

    nbytes: int
    phase: str
    held: dict[str, int]
    at_end: int


#: collectives whose operators of c10d fill their first argument, made for that, from other ranks
_FILLED_FROM_OTHERS = ("recv", "all_gather", "reduce_scatter", "all_to_all")


@cache
def _library(func: Any) -> str | None:
    """The library that multiplies matrices in an operator, as a cluster's file names it; None: none does."""
    name = schema_of(func).name.split("::")[1]
    if name in TRANSFORMER_ENGINE_PRODUCTS:
        return "transformer_engine"
    return "cublas" if name in TORCH_PRODUCTS or name.removesuffix("_") in TORCH_PRODUCTS else None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


class MemoryMeter(Meter):
    """Records the storages of the tensors that operators return, from their birth to their death. Only
    tensors on the mesh's device (the CPU without a mesh) count: what is drawn elsewhere takes none of it."""

    name = "memory"

    def __init__(self, mesh: DeviceMesh | None = None):
        super().__init__(mesh)
        self.modules, self.device = ModuleCalls(), "cpu" if mesh is None else mesh.device_type
        self.log = MemoryLog(place_names=self.modules.names)
        self._numbers: dict[int, int] = {}
        #: the library of each workspace that is there, and whether it is that of autograd's thread
        self._workspaces: set[tuple[str, bool]] = set()
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def phase(self, name: str) -> None:
        self.log.marks.append((name, len(self.log.events)))

    def end_step(self) -> None:
        """A traced step has ended."""
        self.log.ends.append(len(self.log.events))

    def see(self, call: Call) -> None:
        self._note_call(call)
        self.note_workspace(call.func)

    def note_workspace(self, func: Any) -> None:
        """Note the workspace that a library's first matrix product allocates and keeps. torch has one
        for cuBLAS in each thread: that of the forward pass, and that of autograd with its recomputations."""
        library = _library(func)
        if library is None:
            return
        thread = library == "cublas" and in_backward()
        if (library, thread) in self._workspaces:
            return
        self._workspaces.add((library, thread))
        log, number = self.log, self._born(0)
        log.workspaces[number], log.tags[number] = library, "workspaces"

    def _note_call(self, call: Call) -> None:
        communication = call.communication
        if communication is not None and not communication.returns_new:
            if communication.collective in _FILLED_FROM_OTHERS:
                self.tag(_tensors_in(call.args[0]), "communication_buffers", keep=True)
            return
        for tensor in _tensors_in(call.result):
            self.note(tensor)
        if communication is not None:
            self.tag(_tensors_in(call.result), "communication_buffers", keep=True)

    def note(self, tensor: Tensor) -> None:
        """Note the storage of a tensor, if it is new; of a DTensor that of its local part, for its own is as
        large as the whole and holds nothing."""
        while is_traceable_wrapper_subclass(tensor):
            tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._numbers or tensor.device.type != self.device:
            return
        self.set_number(storage, self._born(storage.nbytes()))

    def _born(self, nbytes: int) -> int:
        """The number of a storage that is made now."""
        log, number = self.log, len(self.log.sizes)
        log.sizes.append(nbytes)
        log.places.append(self.modules.place())
        log.events.append(number + 1)
        return number

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a living storage; None: it is not known."""
        return self._numbers.get(storage_key(storage))

    def set_number(self, storage: torch.UntypedStorage, number: int) -> None:
        """Note that a storage whose birth is in the log has that number."""
        key = storage_key(storage)
        self._numbers[key] = number
        if key in self._watches:
            return

        def dies(_: object) -> None:
            self.log.events.append(-self._numbers.pop(key) - 1)
            del self._watches[key]

        self._watches[key] = weakref.ref(storage, dies)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a known storage has been given another size: what it was dies, what it is is born."""
        log, old = self.log, self.number(storage)
        if old is None or log.sizes[old] == storage.nbytes():
            return
        log.events.append(-old - 1)
        self.set_number(storage, new := self._born(storage.nbytes()))
        if old in log.tags:
            log.tags[new] = log.tags[old]

    def tag(self, tensors: Iterable[Tensor], category: str, *, keep: bool = False) -> None:
        """Say what holds these tensors' storages; with ``keep`` an earlier tag stays."""
        for tensor in tensors:
            number = self.number(tensor.untyped_storage())
            if number is not None and not (keep and number in self.log.tags):
                self.log.tags[number] = category

    def renumber(self, first: int, by: int) -> None:
        """Note that the living storages of number ``first`` or later now have numbers larger by ``by``."""
        for storage, number in self._numbers.items():
            if number >= first:
                self._numbers[storage] = number + by

    def stop(self) -> MemoryLog:
        """End the record; later deaths are not noted."""
        self._watches.clear()
        return self.log
