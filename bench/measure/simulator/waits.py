"""The seconds for which ranks wait for communication, and the part for communication between nodes. Times are
those of many ranks at once, as columns of arrays.

Also, the events of a rank in a simulated step, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spbench.bench.measure.simulator.costs import Costs, node_of
from spbench.bench.measure.simulator.program import (
    COMPUTE_STREAM,
    PRECISION_NAMES,
    Category,
    Kind,
    Program,
    shifted,
    shifted_ranks,
)
from spbench.bench.measure.simulator.steps import Steps, posted_late

#: how many numbers of one array are copied at once
_AT_A_TIME = 2**19


class Times(NamedTuple):
    """When the simulated ranks of a program reach its steps, in seconds; arrays are [steps, ranks].

    Attributes:
        reached: when a step's stream reaches the step.
        left: when the stream leaves a step that is a wait.
        start, end: when communication, or a kernel of a further stream, starts and ends.
    """

    reached: np.ndarray
    left: np.ndarray
    start: np.ndarray
    end: np.ndarray


class Waits(NamedTuple):
    """Seconds that each simulated rank of a program waits or communicates.

    Attributes:
        waited: all waits of the compute stream.
        exposed: the part of ``waited`` in which bytes move or another stream copies them.
        across: the part of ``exposed`` for communication that leaves the rank's node.
        busy: the time in which the rank communicates; overlapping transfers count once.
        late: the part of ``waited`` for communication that the rank's own host has not posted yet; 0 if hosts
            take no time.
    """

    waited: np.ndarray
    exposed: np.ndarray
    across: np.ndarray
    busy: np.ndarray
    late: np.ndarray


def waits_of(steps: Steps, costs: Costs, times: Times, hosted: bool, places: np.ndarray) -> Waits:
    """The waits of some simulated ranks of a program.

    Args:
        times: the times of these ranks at the program's steps.
        hosted: whether hosts take time.
        places: the places of these ranks among the simulated ranks.
    """
    crossing = _Crossing(steps, costs)
    # a part of the ranks at a time, because the times are large arrays that are copied
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
    """The first four fields of :class:`Waits`, for the ranks at ``places``, from their ``times``."""
    kinds, streams, partners = steps.columns
    of_compute = streams == COMPUTE_STREAM
    waits = np.flatnonzero((kinds == Kind.WAIT) & of_compute)
    busy = np.flatnonzero((kinds != Kind.WAIT) & (kinds != Kind.RECORD))
    start, end = times.start, times.end
    reached, left, awaited = times.reached[waits], times.left[waits], partners[waits]
    exposed = np.clip(end[awaited] - np.maximum(start[awaited], reached), 0.0, left - reached)
    ended = np.maximum(reached, end[awaited])
    if costs.overlap_loss:  # the loss comes after the end of the communication, or in place of a wait
        exposed = np.maximum(exposed, left - ended)
    across = crossing.shares(awaited, places)
    # a wait for a record of another stream is exposed while any of the rank's streams moves bytes
    points = np.flatnonzero(kinds[awaited] == Kind.RECORD)
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
    """For each step of a program and each simulated rank, whether communication leaves the rank's node.

    Attributes:
        some: whether the world has several nodes.
    """

    def __init__(self, steps: Steps, costs: Costs):
        self._steps, self._cluster = steps, costs.cluster
        self._nodes = node_of(steps.ranks, self._cluster)
        self.some = node_of(steps.program.world - 1, self._cluster) > 0
        kinds, _, partners = steps.columns
        moving = np.isin(kinds, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV))
        # kind and partner as one small number, so that a count by number shows which pairs exist
        many = int(partners[moving].max(initial=0)) + 2
        codes = kinds * many + np.where(moving, partners, -1) + 1
        used = np.bincount(codes) > 0
        self._of = (np.cumsum(used) - 1)[codes]
        each = ((code // many, code % many - 1) for code in np.flatnonzero(used).tolist())
        self._leaves = np.array([self._leave(*one) for one in each] if self.some else ())

    def shares(self, at: np.ndarray, places: np.ndarray) -> np.ndarray:
        """[at, places]: 1.0 if the step ``at`` leaves the node of the rank at a place, else 0.0."""
        if not self.some or not len(at):
            return np.zeros((len(at), len(self._nodes[places])))
        shares: np.ndarray = self._leaves[self._of[at]][:, places].astype(float)
        return shares

    def _leave(self, kind: int, partner: int) -> np.ndarray:
        """[simulated ranks]: whether a step of this kind with this partner leaves the rank's node."""
        program, ranks = self._steps.program, self._steps.ranks
        others = ranks[:, None]
        if kind == Kind.COLLECTIVE:
            others = program.groups[partner].members_by_rank(ranks, program.mesh)
        elif kind in (Kind.SEND, Kind.RECV):
            others = shifted_ranks(ranks, program.peers[partner], program.mesh)[:, None]
        apart: np.ndarray = (node_of(others, self._cluster) != self._nodes[:, None]).any(1)
        return apart


def covered(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """[ranks]: the seconds that the intervals in each column of [events, ranks] cover together."""
    return column_sums(np.subtract(*union(start, end)[::-1]))


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends), each [events, ranks]: for each column, sorted intervals without overlaps that cover the
    same times as the intervals from ``start`` to ``end``."""
    # the intervals are nearly in order, which makes a stable sort fast
    order = np.argsort(start, axis=0, kind="stable")
    start, end = np.take_along_axis(start, order, 0), np.take_along_axis(end, order, 0)
    earlier = np.zeros_like(end)
    np.maximum.accumulate(end[:-1], axis=0, out=earlier[1:])
    first = np.maximum(start, earlier)
    return first, np.maximum(first, end)


def covered_within(start: np.ndarray, end: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """[intervals, ranks]: the seconds of each interval, ``since`` to ``until``, that the union of the
    intervals from ``start`` to ``end``, [events, ranks], covers."""
    covered = np.zeros_like(since)
    if not len(start):
        return covered
    first, last = union(start, end)
    for rank in range(since.shape[1]):
        moments = np.stack((first[:, rank], last[:, rank]), axis=1).ravel()
        # the covered time grows from the start to the end of an interval, and is constant between intervals
        grown = np.cumsum(last[:, rank] - first[:, rank])
        so_far = np.stack((np.concatenate(([0.0], grown[:-1])), grown), axis=1).ravel()
        covered[:, rank] = np.interp(until[:, rank], moments, so_far)
        covered[:, rank] -= np.interp(since[:, rank], moments, so_far)
    return covered


def column_sums(values: np.ndarray) -> np.ndarray:
    """[ranks]: the sums of the columns of [steps, ranks], added from the first row to the last. numpy's sum
    adds a single column in another order, so a rank's sum would depend on how many ranks are simulated."""
    if not len(values):
        return np.zeros(values.shape[1])
    sums: np.ndarray = np.cumsum(values, axis=0)[-1]
    return sums


@dataclass(frozen=True)
class Event:
    """One event of a rank, times in seconds from the start of the step.

    Attributes:
        stream: "compute" (kernels and waits), "communication" (posted by the compute stream), or the name of
            a further stream, see :func:`stream_names`.
        details: further facts by name, such as bytes and FLOPs.
    """

    name: str
    stream: str
    phase: str
    start_s: float
    duration_s: float
    details: dict[str, Any] = field(default_factory=dict)


def stream_names(program: Program) -> list[str]:
    """The name of each stream of a program, in the order of their numbers: by its collectives, or by its
    kernels if it has no collectives."""
    names = ["compute"]
    for stream in range(1, int(program.stream.max(initial=0)) + 1):
        on_it = program.stream == stream
        for kind in (Kind.COLLECTIVE, Kind.KERNEL):
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
    """The kernels, communication and waits of a rank, in program order; waits of 0 s are left out.

    Args:
        times: the rank's times, [steps, 1].
        kernel_s, weights: [events]: seconds of the rank's kernels, and its share (0 to 1) of each event.
        launch_s: seconds of a launch, after each kernel of the compute stream.
        launched: returns the earliest start of an event, see :meth:`HostClock.of_rank`; None: hosts take no
            time.
    """
    streams, names = stream_names(program), program.names
    bounds = [first for _, first in program.marks] + [len(program)]
    phases = [""] * bounds[0]
    for (name, first), end in zip(program.marks, bounds[1:], strict=True):
        phases += [name] * (end - first)
    now, step = 0.0, 0
    for event in range(len(program)):
        launch = 0.0 if launched is None else launched(event, now)
        name, phase = names[program.name[event]], phases[event]
        stream = int(program.stream[event])
        if program.kind[event] == Kind.KERNEL and stream == COMPUTE_STREAM:
            if not weights[event]:
                continue
            seconds, now = float(kernel_s[event]), max(now, launch)
            yield Event(name, "compute", phase, now, seconds, _kernel(program, event))
            now += seconds + launch_s
            continue
        reached = float(times.reached[step, 0])
        if program.kind[event] == Kind.WAIT:
            if stream == COMPUTE_STREAM:
                now = float(times.left[step, 0])
                if now > reached:
                    awaited = int(program.partner[event])  # communication, or the record of a stream
                    of_stream = program.kind[awaited] == Kind.RECORD
                    what = streams[program.stream[awaited]] if of_stream else names[program.name[awaited]]
                    yield Event(f"wait for {what}", "compute", phase, reached, now - reached)
        elif program.kind[event] != Kind.RECORD:
            begun, ended = float(times.start[step, 0]), float(times.end[step, 0])
            if program.kind[event] == Kind.KERNEL:
                details = _kernel(program, event)
            else:
                details = {"bytes": int(program.nbytes[event]), "posted_s": reached}
                details |= _parties(program, event, rank)
            beside = "communication" if stream == COMPUTE_STREAM else streams[stream]
            yield Event(name, beside, phase, begun, ended - begun, details)
        step += 1


def _kernel(program: Program, event: int) -> dict[str, Any]:
    """The details of a kernel: bytes, FLOPs, category, precision and a matmul's shape."""
    details: dict[str, Any] = {
        "bytes": int(program.nbytes[event]),
        "flops": int(program.flops[event]),
        "class": Category.NAMES[program.category[event]],
        "dtype": PRECISION_NAMES[program.precision[event]],
    }
    if program.category[event] == Category.MATMUL:
        details["batch, m, n, k"] = program.shape[event].tolist()
    return details


def _parties(program: Program, event: int, rank: int) -> dict[str, Any]:
    """The global ranks of a collective ("ranks") or of a transfer ("source" and "destination")."""
    partner = int(program.partner[event])
    if program.kind[event] == Kind.COLLECTIVE:
        return {"ranks": list(program.groups[partner].members(rank, program.mesh))}
    peer = shifted(rank, program.peers[partner], program.mesh)
    ends = (rank, peer) if program.kind[event] == Kind.SEND else (peer, rank)
    return {"source": ends[0], "destination": ends[1]}
