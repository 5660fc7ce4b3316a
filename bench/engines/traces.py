"""Traces: what the meters saw of a rank's step, and of all classes of ranks that run the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import Cluster, load_cluster
from spbench.bench.engines.plan import Plan, RankClass, model_parameters, plan, sending_class
from spbench.bench.engines.step_times import add_simulated_time
from spbench.bench.measurement import Measurement
from spbench.bench.meters.allocator import MIB, OutOfMemory, replay
from spbench.bench.meters.communication import CommunicationMeter
from spbench.bench.meters.memory_log import MemoryLog, Peak
from spbench.bench.meters.recorder import Recorder
from spbench.bench.simulator.program import Program
from spbench.bench.simulator.simulate import Simulator
from spbench.impls.models.model import model_preset


@dataclass(frozen=True)
class Failure:
    """Where a rank runs out of memory.

    Attributes:
        step: from 1; 0 is set-up.
        phase: of the step, or SET_UP.
        error: the request that has no room.
        steps_fit: whether set-up alone does not fit.
    """

    step: int
    phase: str
    error: OutOfMemory
    steps_fit: bool = False

    def reason(self, ranks: RankClass) -> str:
        """A line for a result row.

        Args:
            ranks: the class of the rank.
        """
        error, alike = self.error, len(ranks.ranks)
        where = f"{self.phase} of step {self.step}" if self.step else self.phase
        who = f"rank {ranks.first}" + (f", one of {alike} alike" if alike > 1 else "")
        stage = f" (stage {ranks.stage.index})" if ranks.stage.count > 1 else ""
        return (
            f"no room for {error.requested / MIB:.0f} MiB with {error.allocated / MIB:.0f} MiB allocated "
            f"and {error.reserved / MIB:.0f} MiB reserved, in {where} on {who}{stage}"
        )


def needs(memory: RankMemory) -> str:
    """What a rank that does not fit would need, and what would need less."""
    peak = memory.peak
    if memory.failure is not None and memory.failure.steps_fit:
        steps, setup = (each.nbytes / 2**30 for each in (peak, memory.setup))
        return (
            f"the steps fit at {steps:.1f} GiB, set-up does not: {setup:.1f} GiB; initialise on the meta "
            "device, as the backends zero2 and zero3 do (initialize: meta)"
        )
    words = f"the step needs {peak.nbytes / 2**30:.1f} GiB at its peak"
    states = sum(peak.held.get(name, 0) for name in ("parameters", "gradients", "optimizer_state"))
    if states > peak.nbytes / 2:
        return f"{words}, most of it for model states, which the backend zero3 shards over replicas"
    if peak.held.get("activations", 0) > peak.nbytes / 2:
        return f"{words}, most of it for activations, of which recomputation keeps fewer"
    return words


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory in set-up and at each traced step; of one that does not fit, as on a card without a
    limit.

    Attributes:
        setup: the peak of set-up.
        peaks: of each step.
        reserved: the largest number of bytes reserved up to the end of set-up, and up to that of each step.
        reserved_on_card: the same on the card, up to the last step or until it runs out of memory.
        failure: where it does not fit; None if it does.
    """

    setup: Peak
    peaks: Sequence[Peak]
    reserved: Sequence[int]
    reserved_on_card: int
    failure: Failure | None

    @classmethod
    def of(cls, log: MemoryLog, capacity: int | None) -> RankMemory:
        """Replay a log.

        Args:
            capacity: bytes of the card that tensors can have; None: no limit.
        """
        stops = [log.step_start, *log.step_ends]
        found = card = replay(log.sizes, log.events, capacity, stops)
        failure = None
        if card.out_of_memory is not None:
            at = card.events
            step = log.step_of(at)
            fit = not step and replay(log.sizes, log.without_setup(), capacity).out_of_memory is None
            failure = Failure(step, log.phase_of(at), card.out_of_memory, fit)
            found = replay(log.sizes, log.events, None, stops)
        setup, peaks = log.setup_peak(found.blocks), log.peaks(found.blocks)
        return cls(setup, peaks, found.reserved, card.peak_reserved, failure)

    @property
    def peak(self) -> Peak:
        """That of the step with the largest."""
        return max(self.peaks, key=lambda peak: peak.nbytes)

    def _fits(self, step: int) -> bool:
        failure = self.failure
        return failure is None or step < failure.step or (step > 0 and failure.steps_fit)

    def rows(self, ranks: RankClass) -> list[dict[str, Any]]:
        """As :attr:`Measurement.by_class`, of the class of the rank."""
        return [
            {
                "rank": ranks.first,
                "ranks": len(ranks.ranks),
                "stage": ranks.stage.index,
                "step": step,
                "status": "ok" if self._fits(step) else "oom",
                "peak_memory_bytes": peak.nbytes,
                "peak_phase": peak.phase,
                "peak_held": {name: nbytes for name, nbytes in peak.held.items() if nbytes},
                "reserved_memory_bytes": reserved,
                "allocated_bytes": peak.at_end,
            }
            for step, (peak, reserved) in enumerate(
                zip([self.setup, *self.peaks], self.reserved, strict=True)
            )
        ]


@dataclass(frozen=True)
class Trace:
    """What the meters saw of one rank's step, on fake tensors or on real ones.

    Attributes:
        memory: births and deaths of storages.
        program: the order of events, where it was asked for.
        found: what further meters found, by their names.
    """

    cell: Cell
    rank: int
    memory: MemoryLog
    communication: CommunicationMeter
    program: Program | None
    found: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, cell: Cell, rank: int, recorder: Recorder) -> Trace:
        """What a recorder that has been left has seen of a rank."""
        log = recorder.memory.stop()
        program = recorder.events.program() if recorder.events is not None else None
        return cls(cell, rank, log, recorder.communication, program, recorder.found())

    def measurement(self, capacity: int | None, planned: Plan | None = None) -> Measurement:
        """Memory and communication of the rank.

        Args:
            capacity: bytes of the card that tensors can have; status oom where a caching allocator would need
                more. None: no limit.
            planned: the cell's plan; None: it is made.
        """
        planned, memory = planned or plan(self.cell), RankMemory.of(self.memory, capacity)
        peak, ranks = memory.peak, planned.class_of(self.rank)
        measurement = Measurement(
            peak_memory_bytes=peak.nbytes,
            setup_peak_memory_bytes=memory.setup.nbytes,
            reserved_memory_bytes=memory.reserved_on_card,
            usable_memory_bytes=capacity,
            peak_phase=peak.phase,
            peak_rank=self.rank,
            peak_held=peak.held,
            by_class=memory.rows(ranks),
            communication=self.communication.rows(),
            formula=planned.formula(self.rank),
            formula_difference=planned.difference(self.communication, self.rank),
            unpriced_operators={} if self.program is None else self.program.unpriced_calls(),
            meters={name: dict(found) for name, found in self.found.items()},
        )
        if memory.failure is not None:
            measurement.status = "oom"
            measurement.reason = f"{memory.failure.reason(ranks)}; {needs(memory)}"
        return measurement


def largest(by_rank: Sequence[Measurement]) -> Measurement:
    """The measurement with the largest peak, or of a rank that runs out of memory."""
    return max(by_rank, key=lambda m: (m.status == "oom", m.peak_memory_bytes or 0))


def merged(cell: Cell, by_rank: Sequence[Measurement]) -> Measurement:
    """The measurement of a cell from those of its ranks, of which there is at least the first of each class.

    Memory is that of the rank with the largest peak, or of one that runs out of memory. Communication and
    closed form are those of the ranks that send most in its pipeline stage (the last of a ring may send
    nothing). A rank that sends other bytes than its closed form says makes the status mismatch.
    """
    worst = largest(by_rank)
    by_class = [entry for m in by_rank for entry in m.by_class if entry["rank"] == m.peak_rank]
    sender = sending_class(cell, worst.peak_rank).first
    sends = next(m for m in by_rank if m.peak_rank == sender)
    differences = [entry for m in by_rank for entry in m.formula_difference]
    return mismatched(
        replace(
            worst,
            by_class=by_class,
            communication=sends.communication,
            formula=sends.formula,
            formula_difference=differences,
            unpriced_operators={name: n for m in by_rank for name, n in m.unpriced_operators.items()},
        )
    )


def mismatched(found: Measurement) -> Measurement:
    """The measurement, with the status mismatch where meter and closed form disagree."""
    if found.formula_difference:
        found.status, found.reason = "mismatch", _mismatch(found.formula_difference)
    return found


def _mismatch(differences: Sequence[Mapping[str, Any]]) -> str:
    first = differences[0]
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return (
        f"{first['phase']} {first['collective']} on rank {first['rank']}: {first['metered_bytes']} bytes, "
        f"{first['formula_bytes']} by the closed form{more}"
    )


@dataclass(frozen=True)
class ClassTraces:
    """A trace of the first rank of each of a cell's :func:`rank_classes`, in their order.

    Attributes:
        fold: whether a simulation leaves out ranks that do as others do, see :class:`Simulator`.
    """

    cell: Cell
    classes: Sequence[RankClass]
    traces: Sequence[Trace]
    fold: bool = True

    @cached_property
    def by_class(self) -> list[Measurement]:
        """The measurement of each class, without times."""
        capacity = load_cluster(self.cell.cluster).usable_memory_bytes
        planned = plan(self.cell)
        return [trace.measurement(capacity, planned) for trace in self.traces]

    def measurement(self) -> Measurement:
        """The cell's measurement, with times where the programs were recorded and the step fits."""
        found = self.memory_measurement()
        if found.status == "ok" and self.timed:
            add_simulated_time(found, self.cell, self.simulator()())
        return found

    def memory_measurement(self) -> Measurement:
        """The cell's measurement without times."""
        return merged(self.cell, self.by_class)

    @property
    def timed(self) -> bool:
        """Whether the order of events was recorded, which a step time needs."""
        return all(trace.program is not None for trace in self.traces)

    def worst(self) -> Trace:
        """The trace of the class with the largest peak, or of one that runs out of memory."""
        return self.traces[self.by_class.index(largest(self.by_class))]

    def simulator(self, cluster: Cluster | None = None) -> Simulator:
        """The simulation of the whole world; on the cell's own cluster if none is given.

        Raises:
            RatesUnknown: the cluster lacks a figure.
            ValueError: the programs were not recorded.
        """
        programs = [trace.program for trace in self.traces if trace.program is not None]
        if len(programs) < len(self.traces):
            raise ValueError(f"{self.cell.key} was traced without its events, which a simulation needs")
        return Simulator(
            programs,
            [each.ranks for each in self.classes],
            cluster or load_cluster(self.cell.cluster),
            self.cell.precision,
            model_parameters(self.cell),
            self.fold,
            model_preset(*self.cell.model_arguments).attention_kernel,
        )
