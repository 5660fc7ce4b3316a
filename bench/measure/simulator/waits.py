"""How long ranks wait for communication, and which of it leaves the node.

Times are of many ranks at once, as columns of arrays.

What a rank does in a simulated step, event by event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spbench.bench.measure.simulator.costs import Costs, node_of
from spbench.bench.measure.simulator.host_clock import posted_late
from spbench.bench.measure.simulator.program import (
    CATEGORIES,
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    MATMUL,
    PRECISION_NAMES,
    RECORD,
    RECV,
    SEND,
    WAIT,
    Program,
    shifted,
    shifted_ranks,
)
from spbench.bench.measure.simulator.steps import Steps

#: times of one kind that are copied at a time
_AT_A_TIME = 2**19


class Times(NamedTuple):
    """When the simulated ranks of a program are at its steps, in seconds; arrays are [steps, ranks].

    Attributes:
        reached: when its stream reaches a step.
        left: when its stream leaves a step that is a wait.
        start, end: of what moves bytes, and of kernels of further streams.
    """

    reached: np.ndarray
    left: np.ndarray
    start: np.ndarray
    end: np.ndarray


class Waits(NamedTuple):
    """Seconds that each simulated rank of a program waits or communicates.

    Attributes:
        waited: the compute stream waits, for anything.
        exposed: the part of ``waited`` while bytes move or another stream copies them.
        across: the part of ``exposed`` for communication that leaves the rank's node.
        busy: the rank communicates, however many transfers go on at once.
        late: the part of ``waited`` for communication that the rank's own host has not posted yet; 0 where
            hosts take no time.
    """

    waited: np.ndarray
    exposed: np.ndarray
    across: np.ndarray
    busy: np.ndarray
    late: np.ndarray


def waits_of(steps: Steps, costs: Costs, times: Times, hosted: bool, places: np.ndarray) -> Waits:
    """The waits of some simulated ranks of a program.

    Args:
        times: of these ranks.
        hosted: whether hosts take time.
        places: of these ranks among the simulated ones.
    """
    crossing = _Crossing(steps, costs)
    # some ranks at a time, for times are large arrays and are copied here
    width = max(1, _AT_A_TIME // max(1, len(steps)))
    parts = []
    for first in range(0, len(places), width):
        some = slice(first, first + width)
        at = Times(*(np.ascontiguousarray(each[:, some]) for each in times))
        late = posted_late(steps, at.reached, at.left) if hosted else np.zeros(at.reached.shape[1])
        parts.append(Waits(*_waits(steps, costs, crossing, places[some], at), late))
    return Waits(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _waits(
    steps: Steps, costs: Costs, crossing: _Crossing, places: np.ndarray, times: Times
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The first four fields of :class:`Waits`, for the ranks at ``places``, whose ``times`` these are."""
    kinds, streams, partners = steps.columns
    of_compute = streams == COMPUTE_STREAM
    waits = np.flatnonzero((kinds == WAIT) & of_compute)
    busy = np.flatnonzero((kinds != WAIT) & (kinds != RECORD))
    start, end = times.start, times.end
    reached, left, awaited = times.reached[waits], times.left[waits], partners[waits]
    exposed = np.clip(end[awaited] - np.maximum(start[awaited], reached), 0.0, left - reached)
    ended = np.maximum(reached, end[awaited])
    if costs.overlap_loss:  # after the end of what is waited for, or instead of it
        exposed = np.maximum(exposed, left - ended)
    across = crossing.shares(awaited, places)
    # what was done before a point of another stream was reached, is done by any of the rank's streams
    points = np.flatnonzero(kinds[awaited] == RECORD)
    if len(points):
        since, until = reached[points], ended[points]
        moving = covered_within(start[busy], end[busy], since, until)
        exposed[points] = moving + left[points] - until
        if crossing.some:
            leaving = np.where(crossing.shares(busy, places), end[busy], start[busy])
            outside = covered_within(start[busy], leaving, since, until)
            across[points] = np.divide(outside, moving, out=np.zeros_like(outside), where=moving > 0)
    return (
        column_sums(left - reached),
        column_sums(exposed),
        column_sums(exposed * across),
        covered(start[busy], end[busy]),
    )


class _Crossing:
    """Which communication of a program leaves the node of each of its simulated ranks.

    Attributes:
        some: whether the world has several nodes.
    """

    def __init__(self, steps: Steps, costs: Costs):
        self._steps, self._cluster = steps, costs.cluster
        self._nodes = node_of(steps.ranks, self._cluster)
        self.some = node_of(steps.program.world - 1, self._cluster) > 0
        kinds, _, partners = steps.columns
        moving = np.isin(kinds, (COLLECTIVE, SEND, RECV))
        # one number of both, which is small, so that a table tells which there are
        many = int(partners[moving].max(initial=0)) + 2
        codes = kinds * many + np.where(moving, partners, -1) + 1
        used = np.bincount(codes) > 0
        self._of = (np.cumsum(used) - 1)[codes]
        each = ((code // many, code % many - 1) for code in np.flatnonzero(used).tolist())
        self._leaves = np.array([self._leave(*one) for one in each] if self.some else ())

    def shares(self, at: np.ndarray, places: np.ndarray) -> np.ndarray:
        """[steps, ranks]: 1.0 where a step, by its number, leaves the node of a rank, else 0.0."""
        if not self.some or not len(at):
            return np.zeros((len(at), len(self._nodes[places])))
        shares: np.ndarray = self._leaves[self._of[at]][:, places].astype(float)
        return shares

    def _leave(self, kind: int, partner: int) -> np.ndarray:
        """[simulated ranks]: whether a step of that kind with that partner leaves the rank's node."""
        program, ranks = self._steps.program, self._steps.ranks
        others = ranks[:, None]
        if kind == COLLECTIVE:
            others = program.groups[partner].members_by_rank(ranks, program.mesh)
        elif kind in (SEND, RECV):
            others = shifted_ranks(ranks, program.peers[partner], program.mesh)[:, None]
        apart: np.ndarray = (node_of(others, self._cluster) != self._nodes[:, None]).any(1)
        return apart


def covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The length of the union of the intervals in each column of [events, ranks]."""
    return column_sums(np.subtract(*union(start, end)[::-1]))


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each column of [events, ranks], starts and ends of sorted intervals without overlaps that cover the
    same times as the given ones."""
    # nearly in order already, which a stable sort makes use of
    order = np.argsort(start, axis=0, kind="stable")
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    earlier = np.zeros_like(end)
    np.maximum.accumulate(end[:-1], axis=0, out=earlier[1:])
    first = np.maximum(start, earlier)
    return first, np.maximum(first, end)


def covered_within(start: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """[intervals, ranks]: how much of each interval, ``since`` to ``until``, the union of other intervals,
    [events, ranks], covers."""
    covered = np.zeros_like(since)
    if not len(start):
        return covered
    first, last = union(start, end)
    for rank in range(since.shape[1]):
        moments = np.stack((first[:, rank], last[:, rank]), axis=1).ravel()
        # the covered time up to each moment grows from a first to its last, and stands still in between
        grown = np.cumsum(last[:, rank] - first[:, rank])
        so_far = np.stack((np.concatenate(([0.0], grown[:-1])), grown), axis=1).ravel()
        covered[:, rank] = np.interp(until[:, rank], moments, so_far)
        covered[:, rank] -= np.interp(since[:, rank], moments, so_far)
    return covered


def column_sums(values: np.ndarray) -> np.ndarray:
    """Sums of the columns of [steps, ranks], from the first row to the last. numpy's own sum adds in another
    order where there is one column, so that a rank's sum would depend on how many are simulated."""
    if not len(values):
        return np.zeros(values.shape[1])
    sums: np.ndarray = np.cumsum(values, axis=0)[-1]
    return sums


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


def rank_events(
    program: Program,
    rank: int,
    times: Times,
    kernel_s: np.ndarray,
    weights: np.ndarray,
    launch_s: float,
    launched: Callable[[int, float], float] | None,
) -> Iterator[Event]:
    """All that a rank does, in program order; waits of no length are left out.

    Args:
        times: of this rank, [steps, 1].
        kernel_s, weights: [events]: seconds of its kernels, and how much of each event it does.
        launch_s: of the compute stream, after each of its kernels.
        launched: when each event can start at the earliest, see :meth:`HostClock.of_rank`; None: hosts take
            no time.
    """
    streams = stream_names(program)
    bounds = [first for _, first in program.marks] + [len(program)]
    phases = [""] * bounds[0]
    for (name, first), end in zip(program.marks, bounds[1:], strict=True):
        phases += [name] * (end - first)
    now, step = 0.0, 0
    for event in range(len(program)):
        launch = 0.0 if launched is None else launched(event, now)
        name, phase = program.names[program.name[event]], phases[event]
        stream = int(program.stream[event])
        if program.kind[event] == KERNEL and stream == COMPUTE_STREAM:
            if not weights[event]:
                continue
            seconds, now = float(kernel_s[event]), max(now, launch)
            yield Event(name, "compute", phase, now, seconds, _kernel(program, event))
            now += seconds + launch_s
            continue
        reached = float(times.reached[step, 0])
        if program.kind[event] == WAIT:
            if stream == COMPUTE_STREAM:
                now = float(times.left[step, 0])
                if now > reached:
                    words = f"wait for {_waited_for(program, event, streams)}"
                    yield Event(words, "compute", phase, reached, now - reached)
        elif program.kind[event] != RECORD:
            begun, ended = float(times.start[step, 0]), float(times.end[step, 0])
            if program.kind[event] == KERNEL:
                details = _kernel(program, event)
            else:
                details = {"bytes": int(program.nbytes[event]), "posted_s": reached}
                details |= _parties(program, event, rank)
            beside = "communication" if stream == COMPUTE_STREAM else streams[stream]
            yield Event(name, beside, phase, begun, ended - begun, details)
        step += 1


def _kernel(program: Program, event: int) -> dict[str, Any]:
    """Bytes, FLOPs and the like of a kernel."""
    details: dict[str, Any] = {
        "bytes": int(program.nbytes[event]),
        "flops": int(program.flops[event]),
        "class": CATEGORIES[program.category[event]],
        "dtype": PRECISION_NAMES[program.precision[event]],
    }
    if program.category[event] == MATMUL:
        details["batch, m, n, k"] = program.shape[event].tolist()
    return details


def _waited_for(program: Program, wait: int, streams: list[str]) -> str:
    """What a wait is for: communication by its name, or a stream."""
    event = int(program.partner[wait])
    if program.kind[event] == RECORD:
        return streams[program.stream[event]]
    return program.names[program.name[event]]


def _parties(program: Program, event: int, rank: int) -> dict[str, Any]:
    """Global ranks of a transfer or a collective."""
    partner = int(program.partner[event])
    if program.kind[event] == COLLECTIVE:
        return {"ranks": list(program.groups[partner].members(rank, program.mesh))}
    peer = shifted(rank, program.peers[partner], program.mesh)
    ends = (rank, peer) if program.kind[event] == SEND else (peer, rank)
    return {"source": ends[0], "destination": ends[1]}
