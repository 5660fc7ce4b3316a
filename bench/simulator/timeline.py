"""What a simulation found: the step time, what it is made of, and every event of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from spbench.bench.simulator.host_clock import posted_late
from spbench.bench.simulator.program import (
    CATEGORIES,
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    MATRIX_PRODUCT,
    PRECISION_NAMES,
    RECORD,
    SEND,
    WAIT,
    Program,
    shifted,
)

if TYPE_CHECKING:
    from spbench.bench.simulator.costs import Costs
    from spbench.bench.simulator.host_clock import HostClock
    from spbench.bench.simulator.message_matching import World


#: times of one kind that a breakdown copies at a time
_AT_A_TIME = 2**19


@dataclass(frozen=True)
class Event:
    """One event of a rank, times in seconds from the start of the step.

    Attributes:
        stream: "compute" (kernels and waits), "communication" (what that stream posts), or the name of a
            further stream, see :func:`stream_names`.
        details: bytes, FLOPs and the like.
    """

    name: str
    stream: str
    phase: str
    start_s: float
    duration_s: float
    details: dict[str, Any] = field(default_factory=dict)


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


def stream_names(program: Program) -> list[str]:
    """A name of each stream of a program, by its number: after its collectives, or its kernels where it has
    none."""
    names = ["compute"]
    for stream in range(1, int(program.stream.max(initial=0)) + 1):
        on_it = program.stream == stream
        for kind in (COLLECTIVE, KERNEL):
            if found := [program.names[i] for i in np.unique(program.name[on_it & (program.kind == kind)])]:
                break
        names.append(f"stream {stream}: {', '.join(found)}" if found else f"stream {stream}")
    return names


class Timeline:
    """A simulated step.

    Attributes:
        step_time_s: until the last rank's computing and communication have ended, with the step's overhead.
    """

    def __init__(
        self,
        world: World,
        costs: Costs,
        kernel_s: list[np.ndarray],
        computed: list[np.ndarray],
        reached: list[np.ndarray],
        left: list[np.ndarray],
        start: list[np.ndarray],
        end: list[np.ndarray],
        hosts: list[HostClock | None],
    ):
        self._world, self._costs, self._kernel_s = world, costs, kernel_s
        self._reached, self._left, self._start, self._end = reached, left, start, end
        self._computed, self._hosts = computed, hosts
        last = [float(c.max()) for c in computed]
        last += [float(np.nanmax(e)) for e in end if e.size and not np.isnan(e).all()]
        last += [float(host.now.max()) for host in hosts if host is not None]
        self.step_time_s = max(last) + costs.step_overhead_s

    @property
    def world_size(self) -> int:
        return self._world.size

    @cached_property
    def by_rank(self) -> dict[str, np.ndarray]:
        """What each rank's step is made of, in seconds, by global rank.

        compute: kernels of the compute stream by the roofline, each at least the cluster's floor. overhead:
        their launches and the step's own. exposed_communication: waiting while the bytes move, or while
        another stream copies them. bubble: waiting for other ranks to take part, or to end. host, where the
        cluster has figures of it: waiting for the own host. These add up to the step time.
        hidden_communication: bytes move, or another stream copies, while the rank computes.
        """
        parts = {
            name: np.zeros(self._world.size)
            for name in ("compute", "exposed_communication", "bubble", "overhead", "hidden_communication")
        }
        step_overhead = self._costs.step_overhead_s
        for number, steps in enumerate(self._world.steps):
            kernels = (steps.program.kind == KERNEL) & (steps.program.stream == COMPUTE_STREAM)
            parts["compute"][steps.ranks] = np.where(kernels, self._kernel_s[number], 0.0).sum()
            parts["overhead"][steps.ranks] = int(kernels.sum()) * self._costs.launch_s + step_overhead
            # some ranks at a time, for times are large arrays and are copied here
            width = max(1, _AT_A_TIME // max(1, len(steps)))
            for first in range(0, len(steps.ranks), width):
                places = slice(first, first + width)
                ranks = steps.ranks[places]
                waited, exposed, busy = self._communication(number, places)
                parts["exposed_communication"][ranks] = exposed
                tail = self.step_time_s - step_overhead - self._computed[number][places]
                parts["bubble"][ranks] = waited - exposed + tail
                parts["hidden_communication"][ranks] = np.maximum(busy - exposed, 0.0)
                if (host := self._hosts[number]) is not None:
                    computed = self._computed[number][places]
                    late = posted_late(
                        steps, self._reached[number][:, places], self._left[number][:, places]
                    ) + np.maximum(host.now[places] - computed, 0.0)
                    parts["bubble"][ranks] -= late
                    worked = parts["compute"][ranks] + parts["overhead"][ranks] - step_overhead
                    parts.setdefault("host", np.zeros(self._world.size))[ranks] = (
                        computed - worked - waited + late
                    )
        return {name: values[self._world.stands_for] for name, values in parts.items()}

    def _communication(self, number: int, places: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For some ranks of a program, seconds: of waits, of waits while the bytes move, and in which they
        communicate, whatever number of transfers at once."""
        steps = self._world.steps[number]
        kinds, partners = np.array(steps.kinds, dtype=np.int64), np.array(steps.partners, dtype=np.int64)
        of_compute = np.array(steps.streams, dtype=np.int64) == COMPUTE_STREAM
        waits = np.flatnonzero((kinds == WAIT) & of_compute)
        busy = np.flatnonzero((kinds != WAIT) & (kinds != RECORD))
        start, end = self._start[number][:, places], self._end[number][:, places]
        reached, left = self._reached[number][:, places][waits], self._left[number][:, places][waits]
        moving = end[partners[waits]] - np.maximum(start[partners[waits]], reached)
        exposed = np.clip(moving, 0.0, left - reached)
        ended = np.maximum(reached, end[partners[waits]])
        if self._costs.overlap_loss:  # after the end of what is waited for, or instead of it
            exposed = np.maximum(exposed, left - ended)
        # what was done before a point of another stream was reached, is done by any of the rank's streams
        points = np.flatnonzero(kinds[partners[waits]] == RECORD)
        if len(points):
            covered = _covered_within(start[busy], end[busy], reached[points], ended[points])
            exposed[points] = covered + left[points] - ended[points]
        return _sum(left - reached), _sum(exposed), _covered(start[busy], end[busy])

    @property
    def breakdown(self) -> dict[str, float]:
        """Mean over ranks of :attr:`by_rank`, in seconds."""
        return {f"{name}_s": float(values.mean()) for name, values in self.by_rank.items()}

    def breakdown_of(self, rank: int) -> dict[str, float]:
        """What one rank's step is made of, in seconds; see :attr:`by_rank`."""
        return {f"{name}_s": float(values[rank]) for name, values in self.by_rank.items()}

    @property
    def serial_s(self) -> float:
        """Seconds if nothing ran beside anything else anywhere: no step can take longer."""
        total = self._costs.step_overhead_s
        for number, steps in enumerate(self._world.steps):
            program = steps.program
            kernels = int((program.kind == KERNEL).sum())
            ranks = len(steps.all_ranks)
            total += ranks * (float(self._kernel_s[number].sum()) + kernels * self._costs.launch_s)
            if (host := self._hosts[number]) is not None:
                total += ranks * host.serial_s
            # each simulated rank stands for as many
            seconds = (self._end[number] - self._start[number]).sum(1) * (ranks / len(steps.ranks))
            for step, kind in enumerate(steps.kinds):
                if kind == SEND:  # its receive is the same transfer
                    total += float(seconds[step])
                elif kind == COLLECTIVE:
                    total += float(seconds[step]) / len(program.groups[steps.partners[step]].places)
        return total

    def events(self, rank: int) -> Iterator[Event]:
        """All that a rank does, in program order; waits of no length are left out."""
        number, place = int(self._world.program_of[rank]), int(self._world.place_of[rank])
        steps = self._world.steps[number]
        program, kernel_s = steps.program, self._kernel_s[number]
        streams = stream_names(program)
        bounds = [first for _, first in program.marks] + [len(program)]
        phases = [""] * bounds[0]
        for (name, first), end in zip(program.marks, bounds[1:], strict=True):
            phases += [name] * (end - first)
        now, step = 0.0, 0
        host = self._hosts[number]
        launched = None if host is None else host.of_rank(place)
        for event in range(len(program)):
            launch = 0.0 if launched is None else launched(event, now)
            name, phase = program.names[program.name[event]], phases[event]
            stream = int(program.stream[event])
            if program.kind[event] == KERNEL and stream == COMPUTE_STREAM:
                seconds, now = float(kernel_s[event]), max(now, launch)
                yield Event(name, "compute", phase, now, seconds, self._kernel(program, event))
                now += seconds + self._costs.launch_s
                continue
            reached = float(self._reached[number][step, place])
            if program.kind[event] == WAIT:
                if stream == COMPUTE_STREAM:
                    now = float(self._left[number][step, place])
                    if now > reached:
                        words = f"wait for {self._waited_for(program, event, streams)}"
                        yield Event(words, "compute", phase, reached, now - reached)
            elif program.kind[event] != RECORD:
                begun, ended = float(self._start[number][step, place]), float(self._end[number][step, place])
                if program.kind[event] == KERNEL:
                    details = self._kernel(program, event)
                else:
                    details = {"bytes": int(program.nbytes[event]), "posted_s": reached}
                    details |= self._parties(number, event, rank)
                beside = "communication" if stream == COMPUTE_STREAM else streams[stream]
                yield Event(name, beside, phase, begun, ended - begun, details)
            step += 1

    @staticmethod
    def _kernel(program: Program, event: int) -> dict[str, Any]:
        """Bytes, FLOPs and the like of a kernel."""
        details: dict[str, Any] = {
            "bytes": int(program.nbytes[event]),
            "flops": int(program.flops[event]),
            "class": CATEGORIES[program.category[event]],
            "dtype": PRECISION_NAMES[program.precision[event]],
        }
        if program.category[event] == MATRIX_PRODUCT:
            details["batch, m, n, k"] = program.shape[event].tolist()
        return details

    @staticmethod
    def _waited_for(program: Program, wait: int, streams: list[str]) -> str:
        """What a wait is for: communication by its name, or a stream."""
        event = int(program.partner[wait])
        if program.kind[event] == RECORD:
            return streams[program.stream[event]]
        return program.names[program.name[event]]

    def _parties(self, number: int, event: int, rank: int) -> dict[str, Any]:
        """Global ranks of a transfer or a collective."""
        program = self._world.steps[number].program
        partner = int(program.partner[event])
        if program.kind[event] == COLLECTIVE:
            return {"ranks": list(program.groups[partner].members(rank, program.mesh))}
        peer = shifted(rank, program.peers[partner], program.mesh)
        ends = (rank, peer) if program.kind[event] == SEND else (peer, rank)
        return {"source": ends[0], "destination": ends[1]}


def _covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of each column of [events, ranks], the length of the union of its intervals."""
    return _sum(np.subtract(*_union(start, end)[::-1]))


def _union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each column of [events, ranks], starts and ends of intervals that do not overlap and have the same
    union, in order."""
    # nearly in order already, which a stable sort makes use of
    order = np.argsort(start, axis=0, kind="stable")
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    earlier = np.zeros_like(end)
    np.maximum.accumulate(end[:-1], axis=0, out=earlier[1:])
    first = np.maximum(start, earlier)
    return first, np.maximum(first, end)


def _covered_within(start: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """[intervals, ranks]: how much of each interval, ``since`` to ``until``, the union of other intervals,
    [events, ranks], covers."""
    first, last = _union(start, end)
    covered = np.zeros_like(since)
    for rank in range(since.shape[1]):
        moments = np.stack((first[:, rank], last[:, rank]), axis=1).ravel()
        # the covered time up to each moment grows from a first to its last, and stands still in between
        grown = np.cumsum(last[:, rank] - first[:, rank])
        so_far = np.stack((np.concatenate(([0.0], grown[:-1])), grown), axis=1).ravel()
        covered[:, rank] = np.interp(until[:, rank], moments, so_far)
        covered[:, rank] -= np.interp(since[:, rank], moments, so_far)
    return covered


def _sum(values: np.ndarray) -> np.ndarray:
    """Sums of the columns of [steps, ranks], from the first row to the last. numpy's own sum adds in another
    order where there is one column, so that a rank's sum would depend on how many are simulated."""
    if not len(values):
        return np.zeros(values.shape[1])
    sums: np.ndarray = np.cumsum(values, axis=0)[-1]
    return sums
