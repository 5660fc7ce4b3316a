"""The memory meters: every storage's birth and death, on the device and in the host's memory.

They see tensors, not an allocator, so they count the same on fake tensors and on real ones.

In which module's forward or backward something happens: the modules of a step, followed call by call.

Autograd numbers its nodes in the order in which forward makes them. The numbers that a module's call makes
are noted, so that in backward the number of the running node says whose it is. The step itself is
not changed: it gets no hooks, and its graph is left as it is.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.event_log import Streams
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import Call, Meter
from spbench.bench.measure.trace.torch_internals import (
    backward_node,
    in_backward,
    is_traceable_wrapper_subclass,
    next_node,
    replaced,
    schema_of,
    storage_key,
)
from spbench.impls import MAKES_ON_HOST, MAKES_PAGEABLE, flash_attention_backward, inside_backward, workspace

#: of accumulations of gradients, which all have one number; those of other nodes are smaller
_MOST_NODES = 2**62


class ModuleCalls:
    """The modules that are being called.

    Attributes:
        names: the paths of modules by the numbers of their places, with * for the numbers of layers, so that
            layers have one place, and pipeline stages the same ones; the first is "": none.
    """

    def __init__(self) -> None:
        self.names = [""]
        self._places: dict[int, int] = {}
        self._running = [0]
        #: the first node of autograd made at a place, ascending, and that place
        self._nodes, self._places_of_nodes = [0], [0]

    def place(self) -> int:
        """The number of the module that runs now: the innermost one whose forward runs, or whose forward made
        the node of autograd that runs; 0: none."""
        if len(self._running) > 1:
            return self._running[-1]
        node = backward_node()
        if node is None or node > _MOST_NODES:
            return 0
        return self._places_of_nodes[bisect_right(self._nodes, node) - 1]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, calls of modules are noted."""
        call = nn.Module.__call__

        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._running.append(self._place_of(module))
            self._note()
            try:
                return call(module, *args, **kwargs)
            finally:
                self._running.pop()
                self._note()

        with replaced(nn.Module, {"__call__": noted}):
            yield

    def _note(self) -> None:
        self._nodes.append(next_node())
        self._places_of_nodes.append(self._running[-1])

    def _place_of(self, module: nn.Module) -> int:
        """The place of a module; one that is not known yet is the root of its own paths."""
        if id(module) not in self._places:
            for path, each in module.named_modules():
                name = re.sub(r"\d+", "*", path) or type(each).__name__
                if name not in self.names:
                    self.names.append(name)
                self._places.setdefault(id(each), self.names.index(name))
        return self._places[id(module)]


#: the tag of storages of the host that are not pinned
PAGEABLE = "pageable"

#: collectives whose operators of c10d fill their first argument, made for that, from other ranks
_FILLED_FROM_OTHERS = ("recv", "all_gather", "reduce_scatter", "all_to_all")


@cache
def _library(func: Any) -> str | None:
    """The library that multiplies matrices in an operator, as a cluster's file names it; None: none does."""
    return workspace(schema_of(func).name.split("::")[1])


@cache
def makes_on_host(func: Any) -> bool:
    """Whether what an operator returns is in the host's memory, of whichever device its tensors are."""
    return bool(func.namespace == "spbench" and schema_of(func).name.split("::")[1] in MAKES_ON_HOST)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)


class MemoryMeter(Meter):
    """Records the storages of the tensors that operators return, from their birth to their death. Only
    tensors on the mesh's device (the CPU without a mesh) count: what is drawn elsewhere takes none of it.

    Args:
        elsewhere: knows storages that are not on the device, whatever their tensors say.
        streams: says on which stream a storage is made; None: there is one.
    """

    name = "memory"
    always = True

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        elsewhere: MemoryMeter | None = None,
        streams: Streams | None = None,
    ):
        super().__init__(mesh)
        self._elsewhere, self._streams = elsewhere, streams
        #: the kernel of attention that is played, a word of ``model_options.attention``
        self.attention = ""
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
        if makes_on_host(call.func):
            return
        self._note_call(call)
        self.note_inside(call.func, call.args)

    def note_inside(self, func: Any, args: Sequence[Any]) -> None:
        """Note what an operator that has run allocated beside its results, on a card."""
        if func is flash_attention_backward:
            _, q, k, v, *_ = args
            inside = inside_backward(self.attention, q.shape, k.shape, q.itemsize, v.shape[3])
            for number in [self._born(nbytes) for nbytes in inside]:
                self.log.tags[number] = "workspaces"
                self.log.events.append(-number - 1)
        self.note_workspace(func)

    def note_workspace(self, func: Any) -> None:
        """Note the workspace that a library's first matmul allocates and keeps. torch has one
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
        if self._elsewhere is not None and self._elsewhere.number(storage) is not None:
            return
        self.set_number(storage, self._born(storage.nbytes()))

    def _born(self, nbytes: int) -> int:
        """The number of a storage that is made now."""
        log, number = self.log, len(self.log.sizes)
        log.sizes.append(nbytes)
        log.places.append(self.modules.place())
        log.streams.append(0 if self._streams is None else self._streams.current.number)
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
        """Note that a storage has been given another size: the old one dies, and a new one is born."""
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
        return self.log.with_ordered_deaths()


class HostMemoryMeter(MemoryMeter):
    """Records the storages that operators make in the host's memory, which are on no device; those that are
    not pinned have the tag PAGEABLE."""

    name = "host_memory"

    def __init__(self, mesh: DeviceMesh | None = None):
        super().__init__(mesh)
        self.device = "cpu"

    def see(self, call: Call) -> None:
        if makes_on_host(call.func):
            self.note(call.result)
            self.tag_made(call.func, call.result)

    def tag_made(self, func: Any, made: Tensor) -> None:
        """Say of a noted tensor whether the operator that made it pins memory."""
        if schema_of(func).name.split("::")[1] in MAKES_PAGEABLE:
            self.tag([made], PAGEABLE)
