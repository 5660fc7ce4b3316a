"""A rank's memory as a snapshot of PyTorch's, as ``torch.cuda.memory._dump_snapshot`` writes them, for its
viewer (https://pytorch.org/memory_viz) and for ``torch.cuda._memory_viz``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.files import write_whole
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.engines.rank_memory import allocator_of
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measure.memory.allocator import CachingAllocator
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments
from spbench.bench.measure.trace.memory_log import MemoryLog

#: where addresses begin, as they do on a card
_BASE = 0x7F0000000000


def write_snapshot(cell: Cell, rank: int, path: Path) -> Path:
    """Write the set-up and the traced steps of a rank; returns the path.

    Raises:
        UserError: the file cannot be written.
    """
    with traces.used():
        log = tracing.trace(cell, rank, events=can_time(cell)).memory
    return write_whole(path, pickle.dumps(snapshot(log, allocator_of(cell))))


def snapshot(log: MemoryLog, kind: type[CachingAllocator] = CachingAllocator) -> dict[str, Any]:
    """A log as its events and its segments at the end, the blocks as that allocator gives them out on a card
    without a limit. In place of a stack trace stand a storage's kind, module and phase; ``time_us`` is
    the number of the event."""
    allocator, kinds, streams = kind(), log.categories(), log.streams or [0] * len(log.sizes)
    held: dict[int, Any] = {}
    frames: dict[int, list[dict[str, Any]]] = {}
    storages: dict[int, int] = {}
    events: list[dict[str, Any]] = []

    def note(action: str, at: int, number: int, address: int, nbytes: int) -> None:
        stream, of = streams[number], frames[number]
        place = {"addr": _BASE + address, "size": nbytes, "stream": stream, "frames": of, "time_us": at}
        events.append({"action": action, **place})

    for at, event in enumerate(log.events):
        number = abs(event) - 1
        nbytes = log.sizes[number]
        if event < 0 and number in held:
            block = held.pop(number)
            for action in ("free_requested", "free_completed"):
                note(action, at, number, block.address, nbytes)
            del storages[block.address]
            allocator.give_back(block)
        elif event > 0 and nbytes:
            reserved = allocator.reserved
            held[number] = block = allocator.take(nbytes, streams[number])
            module = log.place_names[log.places[number]] if log.places else ""
            step, phase = log.step_of(at), log.phase_of(at)
            words = (kinds[number], module, f"{phase} of step {step}" if step else phase)
            frames[number] = [{"name": word, "filename": "spbench", "line": 0} for word in words if word]
            storages[block.address] = number
            if allocator.reserved > reserved:
                note("segment_alloc", at, number, block.address, allocator.reserved - reserved)
            note("alloc", at, number, block.address, nbytes)
    expandable = kind is ExpandableSegments
    segments = [
        {
            **_segment(blocks, storages, log.sizes, frames),
            "stream": stream,
            "segment_type": "small" if small else "large",
            "is_expandable": expandable,
        }
        for blocks in allocator.segments()
        for stream, small in [allocator.pool_of(blocks[0][0])]
    ]
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}}


def _segment(
    blocks: list[tuple[int, int, bool]],
    storages: Mapping[int, int],
    sizes: list[int],
    frames: Mapping[int, list[dict[str, Any]]],
) -> dict[str, Any]:
    allocated = sum(nbytes for _, nbytes, free in blocks if not free)
    total = sum(nbytes for _, nbytes, _ in blocks)
    shown = []
    for address, nbytes, free in blocks:
        asked = 0 if free else sizes[storages[address]]
        shown.append(
            {
                "address": _BASE + address,
                "size": nbytes,
                "requested_size": asked,
                "state": "inactive" if free else "active_allocated",
                "frames": [] if free else frames[storages[address]],
            }
        )
    return {
        "device": 0,
        "address": _BASE + blocks[0][0],
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(each["requested_size"] for each in shown),
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": shown,
    }
