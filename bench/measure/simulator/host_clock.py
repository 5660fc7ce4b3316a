"""The host's clock of each rank: when the process that launches a rank's kernels comes to each of them.

A host works through the program's events in order: what it did since the event before, as
:attr:`Program.host` counts it, then the event's dispatch. A kernel starts when its stream has done what is
before it, and no sooner than a launch's latency after its dispatch; communication is posted no sooner either.
Where the host waits for its device (a join), its clock goes on from the compute stream's. It is at most some
launches ahead: at the ends of pieces of a program (:data:`PIECE`) it waits until the device has begun a
kernel so many before.

Between two steps of a simulation the compute stream runs kernels alone. What they make of both clocks is a
map of sums and maxima, so that it is known beforehand, and a step costs the same however many kernels are
before it: stream' = max(stream + T, host + M), host' = host + H. T is the kernels' time, H the host's, and M
the longest way through both: up to the launch of a kernel on the host, then on the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spbench.bench.measure.clusters.rates import Host
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, HOST_WORK, KERNEL, RECORD, WAIT, Program
from spbench.bench.measure.simulator.steps import Steps

#: the most events between two moments at which the host waits for a device that is too far behind
PIECE = 128
_FIGURES = dict(zip(HOST_WORK, ("view_s", "node_s", "module_s", ""), strict=True))
_JOINS = HOST_WORK.index("joins")
#: steps whose pieces are made at once
_BLOCK = 256
#: M of a run of events without a kernel of the compute stream
_NO_KERNEL = float("-inf")


def host_seconds(host: Host, program: Program) -> np.ndarray:
    """[events]: seconds that the host takes for each event, with its work since the event before."""
    kinds = program.kind
    dispatch = np.where(kinds == KERNEL, host.seconds("operator_s"), host.seconds("collective_s"))
    dispatch[(kinds == WAIT) | (kinds == RECORD)] = 0.0
    each = np.array([host.seconds(figure) if figure else 0.0 for figure in _FIGURES.values()])
    return dispatch + program.host @ each


class HostClock:
    """The hosts of the simulated ranks that run a program.

    Args:
        costs: of a cluster with a host.
        taken: seconds of each event's kernel, with the gap after it.
        work: of each event, see :func:`host_seconds`.

    Attributes:
        now: the clock of each rank.
        latency: of a launch.
    """

    def __init__(self, costs: Costs, steps: Steps, taken: np.ndarray, work: np.ndarray):
        program, host = steps.program, costs.host
        assert host is not None
        self.latency, self.work = host.seconds("launch_latency_s"), work
        self._begun = host.seconds("step_s")
        self.now, self._larger = np.full(len(steps.ranks), self._begun), steps.larger
        on_compute = (program.kind == KERNEL) & (program.stream == COMPUTE_STREAM)
        joins = (program.host[:, _JOINS] > 0) | (on_compute & host.synchronous)
        cut = np.append(joins, True)
        cut[::PIECE] = True
        cut[steps.at + 1] = True
        #: events at which pieces begin, and the end
        self.cuts = np.flatnonzero(cut)
        first, end = self.cuts[:-1], self.cuts[1:]
        host_s = np.concatenate([[0.0], np.cumsum(self.work)])
        kernels_s = np.concatenate([[0.0], np.cumsum(np.where(on_compute, taken, 0.0))])
        launched = np.concatenate([[0], np.cumsum(on_compute)])
        through = np.where(on_compute, host_s[1:] - kernels_s[:-1], _NO_KERNEL)
        if len(first):
            through = np.maximum.reduceat(through, first) + kernels_s[end] - host_s[first] + self.latency
        allowed = launched[end] - (host.launches_ahead.value or launched[-1] + 1)
        behind = np.searchsorted(launched[end], allowed, side="right") - 1
        others = np.diff(behind, prepend=-1) != 0
        waited_for = behind[others]
        #: [pieces that are waited for, ranks]: when the compute stream has done them
        self._done = np.zeros((len(waited_for), len(steps.ranks)))
        noted = np.full(len(first), -1)
        noted[waited_for] = np.arange(len(waited_for))
        self._behind = np.cumsum(others) - 1
        #: of each piece: whether the host waits for the compute stream before it; T, H and M; where its end
        #: is noted, for later ones to wait for, and where that of the one is noted which the device must have
        #: done before the host ends this one. -1: nowhere; it is never so far ahead, or has waited before
        self._pieces = (
            joins[first],
            np.diff(kernels_s[self.cuts]),
            np.diff(host_s[self.cuts]),
            through,
            noted,
            np.where(others, self._behind, -1),
        )
        #: by the number of their steps' block, the first of the pieces, and a row of each
        self._blocks: dict[int, tuple[int, list[tuple[Any, ...]]]] = {}
        #: of the pieces before each step, and of those after the last, the first; and the end
        before = np.searchsorted(steps.at, first)
        self._first_of = np.searchsorted(before, np.arange(len(steps) + 2)).tolist()

    def reach(
        self, step: int, stream: np.ndarray, host: np.ndarray, who: slice | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The clocks of ranks' compute streams and hosts once they come to a step and the host has dispatched
        it, from the clocks after the step before."""
        first, end, larger = self._first_of[step], self._first_of[step + 1], self._larger
        begin, rows = self._blocks.get(step // _BLOCK) or self._block(step // _BLOCK)
        for joins, kernels_s, host_s, through_s, noted, behind in rows[first - begin : end - begin]:
            if joins:
                host = larger(host, stream)
            if through_s != _NO_KERNEL:  # else the stream stays where it is
                stream = larger(stream + kernels_s, host + through_s)
            if host_s:
                host = host + host_s
            if noted >= 0:
                self._done[noted, who] = stream
            if behind >= 0:
                host = larger(host, self._done[behind, who])
        return stream, host

    def _block(self, number: int) -> tuple[int, list[tuple[Any, ...]]]:
        """Make a block of pieces when it is needed; of millions of pieces most are never gone through."""
        first = self._first_of[number * _BLOCK]
        end = self._first_of[min((number + 1) * _BLOCK, len(self._first_of) - 1)]
        rows = list(zip(*(column[first:end].tolist() for column in self._pieces), strict=True))
        self._blocks[number] = first, rows
        return first, rows

    def of_rank(self, place: int) -> Callable[[int, float], float]:
        """For one simulated rank, when each event can start at the earliest; to be called with an event and
        the compute stream's clock before it, event by event."""
        joins = self._pieces[0]
        begins = dict(
            zip(self.cuts.tolist(), zip(joins.tolist(), self._behind.tolist(), strict=True), strict=False)
        )
        host, behind = self._begun, -1

        def launched(event: int, stream: float) -> float:
            nonlocal host, behind
            if event in begins:
                if behind >= 0:
                    host = max(host, float(self._done[behind, place]))
                joined, behind = begins[event]
                if joined:
                    host = max(host, stream)
            host += float(self.work[event])
            return host + self.latency

        return launched

    @property
    def serial_s(self) -> float:
        """Seconds that a rank takes at most for launching all."""
        return self._begun + float(self.work.sum()) + len(self.work) * self.latency


def posted_late(steps: Steps, reached: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Seconds of each simulated rank in which its compute stream waits for communication that its host has
    not posted yet.

    Args:
        reached, left: [steps, ranks]: when its stream reaches a step, and leaves a wait.
    """
    kinds, streams, partners = steps.columns
    waits = np.flatnonzero((kinds == WAIT) & (streams == COMPUTE_STREAM))
    waits = waits[(streams[partners[waits]] == COMPUTE_STREAM) & (kinds[partners[waits]] != RECORD)]
    late = reached[partners[waits]] - reached[waits]
    seconds: np.ndarray = np.clip(late, 0.0, left[waits] - reached[waits]).sum(0)
    return seconds
