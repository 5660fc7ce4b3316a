"""The memory meters: the birth and death of every storage, on the device and in the host's memory.

The meters see tensors, not an allocator, so they count the same on fake tensors and on real tensors.

:class:`ModuleCalls` knows in which module's forward or backward a storage is born. Autograd numbers its nodes
in the order in which forward makes them. The numbers made in each module's call are noted, so in backward the
number of the running node determines its module. The step gets no hooks, and its graph is not changed.
"""

import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace import torch_internals
from spbench.bench.measure.trace.event_log import Streams
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import Call, Meter
from spbench.impls import MAKES_ON_HOST, MAKES_PAGEABLE, flash_attention_backward, inside_backward, workspace

#: a bound between the numbers of autograd's nodes and the one number of all accumulations of gradients
_MOST_NODES = 2**62


class ModuleCalls:
    """The modules that are running, by which each storage gets the place where it was made.

    Attributes:
        names: the path of each place's module, with * for the number of a layer, so that all layers share
            places, and all pipeline stages too; the first place is "", no module.
    """

    def __init__(self) -> None:
        self.names = [""]
        self._places: dict[int, int] = {}
        self._running = [0]
        #: the number of the first autograd node made at each change of place, ascending; and the places
        self._nodes, self._places_of_nodes = [0], [0]

    def place(self) -> int:
        """The place of the innermost module whose forward runs, or whose forward made the autograd node that
        runs now; 0: no module."""
        if len(self._running) > 1:
            return self._running[-1]
        node = torch_internals.backward_node()
        if node is None or node > _MOST_NODES:
            return 0
        return self._places_of_nodes[bisect_right(self._nodes, node) - 1]

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """The context of a call of a module."""
        self._running.append(self._place_of(module))
        self._note()
        try:
            yield
        finally:
            self._running.pop()
            self._note()

    def _note(self) -> None:
        self._nodes.append(torch_internals.next_node())
        self._places_of_nodes.append(self._running[-1])

    def _place_of(self, module: nn.Module) -> int:
        """The place of a module; a module not seen before becomes the root of its children's paths."""
        if id(module) not in self._places:
            for path, each in module.named_modules():
                name = re.sub(r"\d+", "*", path) or type(each).__name__
                if name not in self.names:
                    self.names.append(name)
                self._places.setdefault(id(each), self.names.index(name))
        return self._places[id(module)]


_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
#: the tag of storages in the host's memory that are not pinned
PAGEABLE = "pageable"

#: collectives whose c10d operators fill their first argument, a buffer, with other ranks' data
_FILLED_FROM_OTHERS = ("recv", "all_gather", "reduce_scatter", "all_to_all")


@cache
def _library(func: Any) -> str | None:
    """The library, by its name in a cluster's file, that does an operator's matmul; None: no matmul."""
    return workspace(torch_internals.schema_of(func).name.split("::")[1])


@cache
def makes_on_host(func: Any) -> bool:
    """Whether an operator's result is in the host's memory, whatever device its tensors name."""
    return bool(
        func.namespace == "spbench" and torch_internals.schema_of(func).name.split("::")[1] in MAKES_ON_HOST
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """A tensor, or the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


class MemoryMeter(Meter):
    """Records the storages of the tensors that operators return, from their birth to their death. Only
    tensors on the mesh's device (the CPU without a mesh) count.

    Args:
        elsewhere: the meter of storages that are not on the device, although their tensors name the device.
        streams: gives the current stream, on which a storage is made; None: there is only one stream.
    """

    name = "memory"
    always = True

    def __init__(
        self, mesh: DeviceMesh | None = None, elsewhere: Self | None = None, streams: Streams | None = None
    ):
        super().__init__(mesh)
        self._elsewhere, self._streams = elsewhere, streams
        #: the attention kernel whose buffers are counted, a word of ``model_options.attention``
        self.attention = ""
        self.modules, self.device = ModuleCalls(), "cpu" if mesh is None else mesh.device_type
        self.log = MemoryLog(place_names=self.modules.names)
        self._numbers: dict[int, int] = {}
        #: (library, whether it is that of autograd's thread) of each workspace that has been made
        self._workspaces: set[tuple[str, bool]] = set()
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def phase(self, name: str) -> None:
        self.log.marks.append((name, len(self.log.events)))

    def end_step(self) -> None:
        """Note that a traced step has ended."""
        self.log.ends.append(len(self.log.events))

    def see(self, call: Call) -> None:
        if call.on_host or makes_on_host(call.func):
            return
        self._note_call(call)
        self._note_inside(call.func, call.args)

    def _note_inside(self, func: Any, args: Sequence[Any]) -> None:
        """Note the storages that an operator, which has run, would allocate inside its kernel on a card."""
        if func in (flash_attention_backward, _FLASH_BACKWARD):
            _, q, k, v, *_ = args
            kernel = self.attention if func is flash_attention_backward else "flash_attention_2"  # torch's
            inside = inside_backward(kernel, q.shape, k.shape, q.itemsize, v.shape[3])
            for number in [self._born(nbytes) for nbytes in inside]:
                self.log.tags[number] = "workspaces"
                self.log.events.append(-number - 1)
        self.note_workspace(func)

    def note_workspace(self, func: Any) -> None:
        """Note the workspace that a library's first matmul allocates and keeps. For cuBLAS, torch has one in
        each thread: the thread of the forward pass, and autograd's thread with its recomputations."""
        library = _library(func)
        if library is None:
            return
        thread = library == "cublas" and torch_internals.in_backward()
        if (library, thread) in self._workspaces:
            return
        self._workspaces.add((library, thread))
        log, number = self.log, self._born(0)
        log.workspaces[number], log.tags[number] = library, "workspaces"

    def _note_call(self, call: Call) -> None:
        communication = call.communication
        if communication is not None and not communication.returns_new:
            if communication.collective in _FILLED_FROM_OTHERS:
                self.tag(tensors_in(call.args[0]), "communication_buffers", keep=True)
            return
        if call.remembered is None or call.remembered.makes_storage:
            for tensor in tensors_in(call.result):
                self.note(tensor)
        if communication is not None:
            self.tag(tensors_in(call.result), "communication_buffers", keep=True)

    def note(self, tensor: Tensor) -> None:
        """Note a tensor's storage, if it is new. For a DTensor, note its local part's storage, because the
        DTensor's own storage has the size of the whole tensor and holds nothing."""
        storage = torch_internals.local(tensor).untyped_storage()
        if torch_internals.storage_key(storage) in self._numbers or tensor.device.type != self.device:
            return
        if self._elsewhere is not None and self._elsewhere.number(storage) is not None:
            return
        self.set_number(storage, self._born(storage.nbytes()))

    def _born(self, nbytes: int) -> int:
        """Write the birth of a storage of ``nbytes`` into the log; returns the storage's number."""
        log, number = self.log, len(self.log.sizes)
        log.sizes.append(nbytes)
        log.places.append(self.modules.place())
        log.streams.append(0 if self._streams is None else self._streams.current.number)
        log.events.append(number + 1)
        return number

    def number(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a living storage in the log; None: the log does not have the storage."""
        return self._numbers.get(torch_internals.storage_key(storage))

    def set_number(self, storage: torch.UntypedStorage, number: int) -> None:
        """Give ``number`` to a storage whose birth is in the log, and note its death when it comes."""
        key = torch_internals.storage_key(storage)
        self._numbers[key] = number
        if key in self._watches:
            return

        def dies(_: object) -> None:
            self.log.events.append(-self._numbers.pop(key) - 1)
            del self._watches[key]

        self._watches[key] = weakref.ref(storage, dies)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size now, as the death of one storage and the birth of another."""
        log, old = self.log, self.number(storage)
        if old is None or log.sizes[old] == storage.nbytes():
            return
        log.events.append(-old - 1)
        self.set_number(storage, new := self._born(storage.nbytes()))
        if old in log.tags:
            log.tags[new] = log.tags[old]

    def tag(self, tensors: Iterable[Tensor], category: str, *, keep: bool = False) -> None:
        """Tag the storages of tensors with a category of memory; with ``keep`` an earlier tag stays."""
        for tensor in tensors:
            number = self.number(tensor.untyped_storage())
            if number is not None and not (keep and number in self.log.tags):
                self.log.tags[number] = category

    def renumber(self, first: int, by: int) -> None:
        """Add ``by`` to the numbers of living storages with the number ``first`` or a larger one."""
        for storage, number in self._numbers.items():
            if number >= first:
                self._numbers[storage] = number + by

    def stop(self) -> MemoryLog:
        """End the recording and return the log; later deaths are not noted."""
        self._watches.clear()
        return self.log.with_ordered_deaths()


class HostMemoryMeter(MemoryMeter):
    """Records the storages that operators make in the host's memory. Storages that are not pinned get the tag
    PAGEABLE."""

    name = "host_memory"

    def __init__(self, mesh: DeviceMesh | None = None):
        super().__init__(mesh)
        self.device = "cpu"

    def see(self, call: Call) -> None:
        if not (call.on_host or makes_on_host(call.func)):
            return
        pinned = ("pin_memory", "non_blocking")  # a copy for which the host does not wait is to pinned memory
        name, first = torch_internals.schema_of(call.func).name.split("::")[1], len(self.log.sizes)
        for x in tensors_in(call.result):
            self.note(x)
        if name in MAKES_PAGEABLE or (call.on_host and not any(map(call.kwargs.get, pinned))):
            self.log.tags |= dict.fromkeys(range(first, len(self.log.sizes)), PAGEABLE)
