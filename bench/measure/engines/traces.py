"""A trace: the records of all meters of one rank's step; and traces kept on disk, so that a step that the
same code has traced before is read instead of traced again.

A trace depends on the cell without its cluster, on the rank, the code, torch and the processor. So cells that
differ only in the cluster are timed from one trace, and repeated searches and scenarios with equal cells read
earlier traces. Only workers of sweeps use the cache (:func:`keeping_traces`): their code is that of the files
in the digest, whereas an interactive session may have changed a class in memory.

The folder is ``traces`` within :func:`spbench.bench.files.cache_folder`. A file has a digest, then a NumPy
archive, compressed by zlib, of the trace's arrays, with one entry of JSON for all other fields. The digest
detects damage after which the file would still read as a trace. No pickle is read.
"""

import hashlib
import io
import json
import logging
import platform
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Self

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter

from spbench.bench.cell import Cell, requirements
from spbench.bench.files import DiskCache, cache_folder
from spbench.bench.measure.engines.cell_schedule import attention_kernel
from spbench.bench.measure.engines.plan import Plan, plan
from spbench.bench.measure.engines.rank_memory import RankMemory, allocator_of, host_peaks, needs
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import replaced
from spbench.bench.measured_code import code_digest
from spbench.bench.measurement import Measurement
from spbench.bench.setting_values import VARIABLES
from spbench.impls import WITH_BUFFERS, Turns, versions


@dataclass(frozen=True)
class Trace:
    """The records of all meters of one rank's step, on fake tensors or on real tensors.

    Attributes:
        memory: births and deaths of storages on the device.
        program: operators and communication in order; None if events were not recorded.
        found: the results of the meters in ``cell.meters``, by the meter's name.
        host_memory: births and deaths of storages in the host's memory.
    """

    cell: Cell
    rank: int
    memory: MemoryLog
    communication: CommunicationMeter
    program: Program | None
    found: Mapping[str, Mapping[str, Any]]
    host_memory: MemoryLog = field(default_factory=MemoryLog)

    @classmethod
    def of(cls, cell: Cell, rank: int, recorder: Recorder) -> Self:
        """The trace of a rank from its recorder, whose ``with`` block has ended."""
        log, on_host = recorder.memory.stop(), recorder.host_memory.stop()
        program = recorder.events.program() if recorder.events is not None else None
        return cls(cell, rank, log, recorder.communication, program, recorder.found(), on_host)

    def same(self, other: Self) -> bool:
        """Whether two traces have equal memory logs, counts of communication and programs."""
        ours, theirs = self.program, other.program
        return (
            (self.memory, self.host_memory) == (other.memory, other.host_memory)
            and self.communication.counts == other.communication.counts
            and (ours is theirs if ours is None or theirs is None else _same_program(ours, theirs))
        )

    def measurement(self, capacity: int | None, planned: Plan | None = None) -> Measurement:
        """The measurement of the rank's memory and communication, without times.

        Args:
            capacity: bytes of the card that tensors can have; the status is oom if a caching allocator needs
                more. None: no limit.
            planned: the cell's plan; None: this method makes the plan.
        """
        planned = planned or plan(self.cell)
        memory = RankMemory.of(self.memory, capacity, allocator_of(self.cell))
        peak, ranks = memory.peak, planned.class_of(self.rank)
        by_class, pinned = memory.rows(ranks), host_peaks(self.host_memory)
        if pinned[-1]:
            by_class = [{**row, "host_memory_bytes": n} for row, n in zip(by_class, pinned, strict=True)]
        measurement = Measurement(
            peak_memory_bytes=peak.nbytes,
            setup_peak_memory_bytes=memory.setup.nbytes,
            reserved_memory_bytes=memory.reserved_on_card,
            usable_memory_bytes=capacity,
            peak_phase=peak.phase,
            peak_rank=self.rank,
            peak_held=peak.held,
            peak_host_memory_bytes=pinned[-1] or None,
            by_class=by_class,
            communication=self.communication.rows(),
            formula=planned.formula(self.rank),
            formula_difference=planned.difference(
                self.communication, self.rank, has_values=self.cell.engine != "virtual"
            ),
            unpriced_operators={} if self.program is None else self.program.unpriced_calls(),
            meters={name: dict(counts) for name, counts in self.found.items()},
        )
        if memory.failure is not None:
            measurement.status = "oom"
            measurement.reason = f"{memory.failure.reason(ranks)}; {needs(memory, self.cell)}"
        return measurement


def _same_program(ours: Program, theirs: Program) -> bool:
    compared = (each.name for each in fields(Program) if each.compare)
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in compared]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


#: the most bytes of all kept traces; a trace of 64 ranks has some 50 kB, a trace of 1,024 ranks some MB
LIMIT_BYTES = 2 * 2**30

#: fields of a cell on which no trace depends: the trace's purpose, and the cards on which the step is timed
_NOT_TRACED = frozenset(
    {"cluster", "engine", "device", "rank", "timing", "search", "learning", "meters", "program", "variant"}
)

#: the name of the JSON entry in a file's archive, and the key in that entry for the name of an array
_REST, _ARRAY = "rest", "array in the archive"
#: the length of a SHA-256 digest
_DIGEST_BYTES = 32

_cache: DiskCache | None = None

_log = logging.getLogger(__name__)


def keeping_traces() -> AbstractContextManager[None]:
    """A context in which this process keeps traces on disk, unless the user turned the cache folder off."""
    folder = cache_folder()
    cache = None if folder is None else DiskCache(folder / "traces", LIMIT_BYTES)
    return replaced(sys.modules[__name__], {"_cache": cache})


def kept_trace(
    make: Callable[[Cell, int, bool, Turns | None], Trace],
    cell: Cell,
    rank: int,
    events: bool,
    turns: Turns | None = None,
) -> Trace:
    """The trace of a rank that an earlier run has kept, or else the trace that ``make`` returns, which is
    kept. One process at a time makes a trace.

    Args:
        make: called with the other arguments.
        events: whether the trace has a program.
        turns: the turns of the traced step, if it runs other turns than the cell.
    """
    asked = cell, rank, events, turns
    if _cache is None:
        return make(*asked)
    key = trace_key(*asked)
    with _cache.making(key):
        if (trace := _read(_cache, key, cell)) is None:
            _cache.write(key, to_bytes(trace := make(*asked)))
    return trace


def _read(cache: DiskCache, key: str, cell: Cell) -> Trace | None:
    content = cache.read(key)
    if content is None:
        return None
    try:
        return from_bytes(content, cell)
    except DamagedTrace as error:
        _log.warning("a kept trace is damaged, so the step is traced again: %s (%s)", cache.path(key), error)
        return None


def trace_key(cell: Cell, rank: int, events: bool, turns: Turns | None = None) -> str:
    """The digest (SHA-256, in hexadecimal) of all settings, code and versions on which a trace depends."""
    options = {"model_options": cell.model_arguments[1]}  # with the program's padding of documents
    settings = cell.model_dump(mode="json", exclude=set(_NOT_TRACED)) | options
    # these settings matter only after a trace is made
    for name in (*VARIABLES, "alloc_retries", "cuda_graph"):
        del settings["training"][name]
    kernel = attention_kernel(cell)
    content = {
        "cell": settings,
        "rank": rank,
        "events": events,
        "turns": turns and asdict(turns),
        # the attention kernel whose buffers a trace contains; "": no kernel with buffers
        "buffers": kernel if kernel in WITH_BUFFERS and cell.precision in ("fp16", "bf16") else "",
        "code": code_digest(),
        "torch": torch.__version__,
        "peers": versions(requirements(cell.strategy)),
        "processor": platform.machine(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class DamagedTrace(ValueError):
    """The content of a file is no trace."""


@dataclass
class _Kept:
    """The content of a trace's file. ``calls`` are the numbers of ``operations``, in the order of calls."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    rank: int
    memory: MemoryLog
    host_memory: MemoryLog
    program: Program | None
    axes: dict[str, str]
    operations: list[tuple[Operation, int]]
    calls: np.ndarray


_KEPT = TypeAdapter(_Kept)


def to_bytes(trace: Trace) -> bytes:
    """The content of a file for a trace, without its cell and further meters; see :func:`from_bytes`."""
    assert not trace.found, "results of further meters are not kept"
    meter, arrays = trace.communication, dict[str, Any]()
    numbers = {operation: number for number, operation in enumerate(meter.counts)}
    calls = np.array([numbers[operation] for operation in meter.calls], dtype=np.int64)
    logs, operations = (trace.memory, trace.host_memory), [*meter.counts.items()]

    def in_text(value: Any) -> dict[str, Any]:
        if is_dataclass(value):
            return vars(value)
        name = f"array {len(arrays)}"
        arrays[name] = value
        return {_ARRAY: name}

    text = json.dumps(_Kept(trace.rank, *logs, trace.program, meter.axes, operations, calls), default=in_text)
    stream = io.BytesIO()
    arrays[_REST] = np.frombuffer(text.encode(), dtype=np.uint8)
    np.savez(stream, **arrays)
    # level 1 takes a sixth of the time of higher levels, and the result is at most a tenth larger
    archive = zlib.compress(stream.getvalue(), level=1)
    return hashlib.sha256(archive).digest() + archive


def from_bytes(content: bytes, cell: Cell) -> Trace:
    """The trace of ``cell`` from the bytes that :func:`to_bytes` returned.

    Raises:
        DamagedTrace: the bytes differ from those that were written.
    """
    digest, archive = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(archive).digest() != digest:
        raise DamagedTrace("its digest is not that of its content")
    try:
        with np.load(io.BytesIO(zlib.decompress(archive)), allow_pickle=False) as file:
            arrays = dict(file)
        text = arrays.pop(_REST).tobytes()
        kept = _KEPT.validate_python(
            json.loads(text, object_hook=lambda each: arrays[each[_ARRAY]] if _ARRAY in each else each)
        )
        meter, operations = CommunicationMeter(kept.axes), [operation for operation, _ in kept.operations]
        meter.counts.update(dict(kept.operations))
        meter.calls += [operations[number] for number in kept.calls.tolist()]
    except Exception as error:  # a file that was never a trace: NumPy and zipfile raise what they will
        raise DamagedTrace(f"{type(error).__name__}: {error}") from error
    return Trace(cell, kept.rank, kept.memory, meter, kept.program, {}, kept.host_memory)
