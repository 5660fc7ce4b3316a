"""The event log: a rank's operators and communication in order, with all facts on which their time depends.

The log has no times: :mod:`measure.simulator.simulate` turns its program into seconds on a cluster.

Libraries that overlap communication with computing, such as torch's ``fully_shard``, issue copies and
collectives on streams of their own and order them by events, through the module of the device's type
(``torch.cuda``, ``torch.cpu``). The streams of ``torch.cpu`` do nothing. While a step is logged,
:func:`recorded_streams` replaces them by recorded streams and events, which write the library's calls into
the program: the stream of each operator, and the waits between streams. Recorded streams change nothing else:
no tensor lives longer, and no operator runs in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.simulator.program import COMPUTE_STREAM, Category, Group, Kind, Program, offset
from spbench.bench.measure.simulator.program_builder import CHECK, JOIN, MODULE, NODE, VIEW, ProgramBuilder
from spbench.bench.measure.trace.meter import Call, Communication, Meter
from spbench.bench.measure.trace.operator_prices import price_of
from spbench.bench.measure.trace.torch_internals import backward_node, replaced, storage_key


class Streams:
    """The streams of a program.

    Args:
        builder: writes the program; None: there is no program.

    Attributes:
        current: the stream on which operators are issued.
        open: whether records and waits are written into the program.
    """

    def __init__(self, builder: ProgramBuilder | None):
        self._builder = builder
        #: the next stream's number; the compute stream has the first
        self.numbers = count()
        #: the recorded events that a library still holds
        self.events: WeakSet[RecordedEvent] = WeakSet()
        self.open = False
        self.current = RecordedStream(self)

    def close(self) -> None:
        """Forget the program, because a library may keep these streams for longer."""
        self._builder, self.open = None, False

    @contextmanager
    def issuing(self, stream: RecordedStream | None) -> Iterator[None]:
        """Within the context, operators are issued on ``stream``; None: on the current stream."""
        before, self.current = self.current, stream or self.current
        self._switch(before)
        try:
            yield
        finally:
            inside, self.current = self.current, before
            self._switch(inside)

    def _switch(self, before: RecordedStream) -> None:
        if self._builder is not None and self.current is not before:
            self._builder.on_stream(self.current.number)

    def record(self, stream: RecordedStream) -> int:
        """Write down a record of a stream; returns the number of its event in the program, -1 if none."""
        if self._builder is None or not self.open:
            return -1
        with self.issuing(stream):
            return self._builder.record()

    def wait(self, stream: RecordedStream, event: int) -> None:
        """Write down that a stream waits for an event of the program."""
        if self._builder is not None and self.open and event >= 0:
            with self.issuing(stream):
                self._builder.wait(event)

    def join(self) -> None:
        """Write down that the host waits until the device has done all its work."""
        if self._builder is not None and self.open:
            self._builder.host_work += JOIN


class RecordedStream(torch.cpu.Stream):
    """A stream that writes its records and waits into the program, in place of a ``torch.cpu.Stream``.

    Attributes:
        number: the stream's number in the program.
    """

    def __init__(self, streams: Streams, priority: int = -1):
        super().__init__(priority)
        self._streams, self.number = streams, next(streams.numbers)

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:  # type: ignore[override]
        event = event or RecordedEvent(self._streams)
        event.record(self)
        return event

    # streams that outlive their log (a strategy's copy stream, FSDP's gather stream) may meet torch's own

    def wait_event(self, event: RecordedEvent) -> None:
        if isinstance(event, RecordedEvent):
            self._streams.wait(self, event.number)

    def wait_stream(self, stream: RecordedStream) -> None:
        if stream is not self and isinstance(stream, RecordedStream):
            self.wait_event(stream.record_event())


class RecordedEvent(torch.cpu.Event):
    """An event that writes its records and waits into the program, in place of a ``torch.cpu.Event``.

    Attributes:
        number: the record's event in the program; -1: the event has no record there, and no stream waits.
    """

    def __init__(self, streams: Streams, *_: Any, **__: Any):
        self._streams, self.number = streams, -1
        streams.events.add(self)

    def record(self, stream: RecordedStream | None = None) -> None:
        self.number = self._streams.record(stream or self._streams.current)

    def wait(self, stream: RecordedStream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)


@contextmanager
def recorded_streams(streams: Streams) -> Iterator[None]:
    """Within the context, ``streams`` supplies the streams and events of ``torch.cpu``."""
    assert streams.current.number == COMPUTE_STREAM
    ours = {
        "Stream": partial(RecordedStream, streams),
        "Event": partial(RecordedEvent, streams),
        "current_stream": lambda device=None: streams.current,
        "stream": streams.issuing,
        "synchronize": lambda device=None: streams.join(),
    }
    with replaced(torch.cpu, ours):
        yield


_ITEM = torch.ops.aten._local_scalar_dense.default
_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default


class PostedWork(dist.Work):
    """The ``dist.Work`` of a posted communication, which reports each wait.

    Args:
        waited: called with ``event`` at each wait.
        event: the index of the communication in the program; -1: the program does not have it.
    """

    def __init__(self, waited: Callable[[int], None], event: int):
        super().__init__()
        self._waited, self.event = waited, event

    def wait(self, timeout: Any = None) -> bool:
        self._waited(self.event)
        return True

    def is_completed(self) -> bool:
        return True


class EventLog(Meter):
    """Writes down the program of this rank, from the first phase on.

    Args:
        mesh: the device mesh.
    """

    name = "event_log"
    always = True

    def __init__(self, mesh: DeviceMesh | None):
        if mesh is None:
            raise ValueError("events are noted relative to a device mesh, and there is none")
        super().__init__(mesh)
        self.rank = mesh.get_rank()
        self.builder = ProgramBuilder(mesh.shape)
        self._pipeline: int | None = (mesh.mesh_dim_names or ()).index("pp")
        #: the streams on which operators are issued
        self.streams = Streams(self.builder)
        self._groups: dict[str, tuple[list[int], Group]] = {}
        #: the distance to each peer along the axes of the mesh, by the peer's global rank
        self._offsets: dict[int, tuple[int, ...]] = {}
        # C++ holds only the C++ half of a Work, so this list keeps the Python half, which has ``wait``
        self._works: list[PostedWork] = []
        #: the event of each functional collective without a wait so far, by the key of its result's storage
        self._functional: dict[int, int] = {}
        self.running = False
        #: the :func:`backward_node` that called the last operator
        self._node: int | None = None

    def on_mesh(self, sizes: tuple[int, ...]) -> None:
        """Write groups and peers relative to a mesh of these sizes, without folded axes, from now on."""
        self.builder.mesh, self._pipeline = sizes, None

    def count_calls(self, calls: int, checks: bool = False) -> None:
        """Count so many calls of modules as the host's work, and whether the host checks its queue."""
        if self.running:
            self.builder.host_work += MODULE * calls + CHECK * checks

    def count_node(self) -> None:
        """Count an autograd node as the host's work if the operator to be written comes from a new node."""
        node = backward_node()
        if node != self._node:
            self._node = node
            if node is not None:
                self.builder.host_work += NODE

    def phase(self, name: str) -> None:
        self.running = self.streams.open = True
        self.builder.phase(name)

    def program(self) -> Program:
        """The program of all events so far. Works in flight are dropped, since they keep the meter alive."""
        self._works.clear()
        self.streams.close()
        return self.builder.program()

    def renumber_posts(self, first: int, by: int) -> None:
        """Add ``by`` to the event numbers of communication that was posted as event ``first`` or later."""
        for work in reversed(self._works):  # in the order of their events
            if work.event < first:
                break
            work.event += by
        for storage, event in self._functional.items():
            if event >= first:
                self._functional[storage] = event + by

    def see(self, call: Call) -> None:
        if not self.running or call.communication is not None:
            return
        self.count_node()
        func, args, kwargs, result, _, remembered, on_host = call
        if func is _WAIT_TENSOR:
            self._waited(self._functional.pop(storage_key(args[0]), -1))
            return
        price = price_of(func)
        builder = self.builder
        if price.free:
            builder.host_work += JOIN if func is _ITEM else VIEW
            return
        if not price.known:
            builder.unpriced.add(price.name)
        if (figures := remembered.price if remembered else None) is None:
            figures = price.of(args, kwargs or {}, result)
            if remembered:
                remembered.price = figures
        category = Category.HOST_UPDATE if on_host else figures[0]
        builder.add_kernel((Kind.KERNEL, builder.named(price.name), category, *figures[1:]))

    def post(self, args: Sequence[Any], result: Any, communication: Communication) -> Any:
        """Write down a call that communicates; returns its result, with a :class:`PostedWork` as its Work."""
        event = -1
        if self.running:
            self.count_node()
            event = self._event(args, communication)
        if communication.returns_new:
            for x in [result] if isinstance(result, Tensor) else result:
                self._functional[storage_key(x)] = event
            return result
        work = PostedWork(self._waited, event)
        self._works.append(work)
        boxed = work.boxed()
        if isinstance(result, (tuple, list)):
            return (*result[:-1], boxed)
        return boxed

    def _event(self, args: Sequence[Any], communication: Communication) -> int:
        ranks, group = self._group(communication.group)
        if communication.collective in ("send", "recv"):
            peer = ranks[args[2]]
            by = self._offsets.get(peer)
            if by is None:
                by = self._offsets[peer] = offset(self.rank, peer, self.builder.mesh)
            post = self.builder.send if communication.collective == "send" else self.builder.recv
            return post(communication.payload_bytes, by)
        return self.builder.collective(communication.collective, communication.payload_bytes, group)

    def _waited(self, event: int) -> None:
        if event >= 0:
            self.builder.wait(event)

    def _group(self, group: dist.ProcessGroup) -> tuple[list[int], Group]:
        known = self._groups.get(group.group_name)
        if known is None:
            ranks = dist.get_process_group_ranks(group)
            known = ranks, Group.of(ranks, self.builder.mesh, self._pipeline)
            self._groups[group.group_name] = known
        return known
