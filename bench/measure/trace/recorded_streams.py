"""Streams and events that write down in a rank's program what they order.

Libraries that overlap communication with computing, as torch's ``fully_shard`` does, issue copies and
collectives on streams of their own and order them by events, through the module of the device's type
(``torch.cuda``, ``torch.cpu``). The streams of ``torch.cpu`` do nothing. While a step is logged,
:func:`recorded_streams` puts streams and events that write down what they order in their place, so that the
library's own calls say which stream each operator is issued on and what waits for what. They do nothing else:
no tensor lives longer, and nothing runs in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from spbench.bench.measure.simulator.program import COMPUTE_STREAM
from spbench.bench.measure.simulator.program_builder import JOIN, ProgramBuilder
from spbench.bench.measure.trace.torch_internals import replaced


class Streams:
    """The streams of a program.

    Args:
        builder: of the program; None: nothing is written down.

    Attributes:
        current: the stream on which operators are issued.
        open: whether events are written down.
    """

    def __init__(self, builder: ProgramBuilder | None):
        self._builder = builder
        self._streams = 0
        self._events: WeakSet[RecordedEvent] = WeakSet()
        self.open = False
        self.current = RecordedStream(self)

    def new_number(self) -> int:
        """The number of a further stream; the first is the compute stream's."""
        self._streams += 1
        return self._streams - 1

    def watch(self, event: RecordedEvent) -> None:
        """Know an event for as long as a library holds it."""
        self._events.add(event)

    def holds_points(self, first: int) -> bool:
        """Whether something may yet wait for a point of the program, from event ``first`` on."""
        return any(event.number >= first for event in self._events)

    def close(self) -> None:
        """Forget the program: a library may keep its streams for longer."""
        self._builder, self.open = None, False

    @contextmanager
    def issuing(self, stream: RecordedStream | None) -> Iterator[None]:
        """What is issued inside is issued on that stream; None: on the current one."""
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
        """Write down the point that a stream has come to; returns its event, -1 where none is written."""
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
        """Write down that the host waits until the device has done all that it was given."""
        if self._builder is not None and self.open:
            self._builder.host_work += JOIN


class RecordedStream(torch.cpu.Stream):
    """A stream, with the methods of ``torch.cuda.Stream`` that ``torch.cpu.Stream`` has.

    Attributes:
        number: of the stream in the program.
    """

    def __init__(self, streams: Streams, priority: int = -1):
        super().__init__(priority)
        self._streams, self.number = streams, streams.new_number()

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:  # type: ignore[override]
        event = event or RecordedEvent(self._streams)
        event.record(self)
        return event

    def wait_event(self, event: RecordedEvent) -> None:
        self._streams.wait(self, event.number)

    def wait_stream(self, stream: RecordedStream) -> None:
        # what outlives its log, as a strategy's stream of copies, may meet one of torch's own
        if stream is not self and isinstance(stream, RecordedStream):
            self.wait_event(stream.record_event())


class RecordedEvent(torch.cpu.Event):
    """An event, with the methods of ``torch.cuda.Event`` that ``torch.cpu.Event`` has.

    Attributes:
        number: of the point in the program; -1: there is none, and nothing waits for it.
    """

    def __init__(self, streams: Streams, *_: Any, **__: Any):
        self._streams, self.number = streams, -1
        streams.watch(self)

    def record(self, stream: RecordedStream | None = None) -> None:
        self.number = self._streams.record(stream or self._streams.current)

    def wait(self, stream: RecordedStream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)


@contextmanager
def recorded_streams(streams: Streams) -> Iterator[None]:
    """Inside, the streams and events of ``torch.cpu`` are those of ``streams``."""
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
