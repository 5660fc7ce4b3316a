"""A simulated timeline as Chrome trace JSON, which Perfetto (https://ui.perfetto.dev) opens.

One process a rank; in it the phases of the step, the compute stream, as many communication rows as transfers
overlap (slices of one row may not overlap partly), and a row for each further stream. The format: Trace Event
Format, complete events ("ph": "X"), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spbench.bench.files import write_whole
from spbench.bench.measure.simulator.rank_events import Event
from spbench.bench.measure.simulator.timeline import Timeline

_PHASES, _COMPUTE = 0, 1
_MICRO = 1e6


def trace_events(timeline: Timeline, ranks: Iterable[int]) -> Iterator[dict[str, Any]]:
    """The trace events of some ranks."""
    for rank in ranks:
        yield _named("process_name", rank, 0, f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        yield _named("thread_name", rank, _PHASES, "phases")
        yield _named("thread_name", rank, _COMPUTE, "compute")
        events = list(timeline.events(rank))
        yield from _phases(rank, events)
        named: dict[int, str] = {_COMPUTE: "compute"}
        for event, row in in_rows(events):
            thread = _COMPUTE + row
            if thread not in named:
                before = [*named.values()].count(event.stream)
                named[thread] = event.stream
                words = f"{event.stream} {before + 1}" if before else event.stream
                yield _named("thread_name", rank, thread, words)
            yield _complete(event.name, event.stream, rank, thread, event.start_s, event.duration_s) | {
                "args": {"phase": event.phase, **event.details}
            }


def in_rows(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """The events of a rank by their start, each with a row in which no two overlap: 0 is that of the
    compute stream, 1 and on are those of communication and of further streams, as many of each as its events
    overlap."""
    #: of each row but the first: its stream, and when it is free again
    rows: list[tuple[str, float]] = []
    for event in sorted(events, key=lambda e: e.start_s):
        if event.stream == "compute":
            yield event, 0
            continue
        of_stream = (i for i, (stream, _) in enumerate(rows) if stream == event.stream)
        row = next((i for i in of_stream if rows[i][1] <= event.start_s), len(rows))
        rows[row : row + 1] = [(event.stream, event.start_s + event.duration_s)]
        yield event, row + 1


def export_trace(timeline: Timeline, path: Path, ranks: Iterable[int] = (0,)) -> None:
    """Write the trace of some ranks to a file, whole or not at all; missing folders are made.

    Raises:
        UserError: it cannot be written; an earlier one is unchanged.
    """
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"step_time_s": timeline.step_time_s, "world_size": timeline.world_size},
        "traceEvents": list(trace_events(timeline, ranks)),
    }
    write_whole(path, json.dumps(content, separators=(",", ":"), allow_nan=False))


def _phases(rank: int, events: list[Event]) -> Iterator[dict[str, Any]]:
    """A slice from the first to the last thing that the compute stream does of a phase without a break."""
    name, start, end = "", 0.0, 0.0
    for event in [*(e for e in events if e.stream == "compute"), None]:
        if event is None or event.phase != name:
            if name and end > start:
                yield _complete(name, "phase", rank, _PHASES, start, end - start)
            if event is not None:
                name, start = event.phase, event.start_s
        if event is not None:
            end = event.start_s + event.duration_s


def _complete(
    name: str, category: str, rank: int, thread: int, start_s: float, duration_s: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": start_s * _MICRO,
        "dur": duration_s * _MICRO,
    }


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}
