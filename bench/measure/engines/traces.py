"""A trace: what the meters saw of a rank's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.host_memory import host_peaks
from spbench.bench.measure.engines.plan import Plan, plan
from spbench.bench.measure.engines.rank_memory import RankMemory, allocator_of, needs
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.trace.communication import CommunicationMeter
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measurement import Measurement


@dataclass(frozen=True)
class Trace:
    """What the meters saw of one rank's step, on fake tensors or on real ones.

    Attributes:
        memory: births and deaths of storages.
        program: the order of events, where it was asked for.
        found: what further meters found, by their names.
        host_memory: births and deaths in the host's memory.
    """

    cell: Cell
    rank: int
    memory: MemoryLog
    communication: CommunicationMeter
    program: Program | None
    found: Mapping[str, Mapping[str, Any]]
    host_memory: MemoryLog = field(default_factory=MemoryLog)

    @classmethod
    def of(cls, cell: Cell, rank: int, recorder: Recorder) -> Trace:
        """What a recorder that has been left has seen of a rank."""
        log, on_host = recorder.memory.stop(), recorder.host_memory.stop()
        program = recorder.events.program() if recorder.events is not None else None
        return cls(cell, rank, log, recorder.communication, program, recorder.found(), on_host)

    def same(self, other: Trace) -> bool:
        """Whether both have the same logs of memory, counts of communication, and program."""
        ours, theirs = self.program, other.program
        return (
            (self.memory, self.host_memory) == (other.memory, other.host_memory)
            and self.communication.counts == other.communication.counts
            and (ours is theirs if ours is None or theirs is None else _same_program(ours, theirs))
        )

    def measurement(
        self, capacity: int | None, planned: Plan | None = None, whole: bool = False
    ) -> Measurement:
        """Memory and communication of the rank.

        Args:
            capacity: bytes of the card that tensors can have; status oom where a caching allocator would need
                more. None: no limit.
            planned: the cell's plan; None: it is made.
            whole: see :meth:`RankMemory.of`.
        """
        planned = planned or plan(self.cell)
        memory = RankMemory.of(self.memory, capacity, allocator_of(self.cell), whole)
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
            formula_difference=planned.difference(self.communication, self.rank),
            unpriced_operators={} if self.program is None else self.program.unpriced_calls(),
            meters={name: dict(found) for name, found in self.found.items()},
        )
        if memory.failure is not None:
            measurement.status = "oom"
            measurement.reason = f"{memory.failure.reason(ranks)}; {needs(memory, self.cell)}"
        return measurement


def _same_program(ours: Program, theirs: Program) -> bool:
    pairs = [(getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(Program)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
