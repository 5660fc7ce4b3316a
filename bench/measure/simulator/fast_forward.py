"""Fast-forward: periods of a program that change all clocks by the same, written down at once.

Where all ranks run one program, they are at the same step at once, and what comes later depends on few times:
the clocks of streams and hosts, the ends of communication that is waited for later, and when channels are
free. Times are sums and maxima of costs. So if a period has moved each of these by one and the same time, the
next does what this one did, so much later, and so do all after it while the program repeats
(:mod:`measure.simulator.periods`).

Two things make this exact, to the bit. Sums of floats depend on their order and on how large they have grown;
so the costs of a program with periods are whole ticks, of a power of two so small that a float holds the
whole step in ticks (:func:`measure.simulator.occupancy.tick_of`), and their sums have no rounding. And hosts
wait for what their devices did many periods ago; this is looked at for each period that is written down
(:meth:`HostClock.written_on`), and what would go otherwise is simulated.
"""

from __future__ import annotations

import numpy as np

from spbench.bench.measure.simulator.host_clock import HostClock, Ran
from spbench.bench.measure.simulator.periods import Periods
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, SEND, WAIT
from spbench.bench.measure.simulator.simulation_state import SimulationState

#: periods that are looked at one by one before some are let pass
_PATIENCE = 16


class FastForward:
    """Writes periods into the simulation of a world of one program.

    Attributes:
        next: the step at which it is to be called; -1: at none any more.
    """

    def __init__(self, simulation: SimulationState):
        self._simulation = simulation
        losses = simulation.losses[0]
        periods = simulation.world.periods[0]
        #: what is to come, the next run last
        self._ahead = [one for one in reversed(periods) if not any(losses[one.first : one.end])]
        self._begin()

    def _begin(self) -> None:
        """Look at the next run of periods, after its first."""
        #: the state at the boundary before, if it was looked at
        self._before: np.ndarray | None = None
        self.next = -1
        if not self._ahead:
            return
        one, simulation, (steps,) = self._ahead[-1], self._simulation, self._simulation.steps
        self.next = one.first + one.steps
        period = range(one.first, self.next)
        host, streams = simulation.hosts[0], {steps.streams[step] for step in period}
        channels = {
            steps.partners[step]: simulation.channels.of(0, step)
            for step in period
            if steps.kinds[step] == SEND
        }
        #: the clocks that move: first the compute stream's and, if it has one, the host's
        self._clocks = [
            simulation.clocks[0][COMPUTE_STREAM],
            *([] if host is None else [host.now]),
            *(simulation.clocks[0][stream] for stream in sorted(streams - {COMPUTE_STREAM})),
            *(channel.free for channel in channels.values()),
        ]
        awaited = {steps.partners[step] - one.first for step in period if steps.kinds[step] == WAIT}
        #: what is awaited of earlier periods, counted from a period's first step
        self._awaited = [step for step in sorted(awaited) if step < 0]

    def __call__(self, at: int) -> int:
        """The step to go on from, when all ranks have come to a period's first step and their clocks are
        noted in the simulation."""
        one, before = self._ahead[-1], self._before
        number = (at - one.first) // one.steps
        ends = self._simulation.end[0]
        state = np.array([*self._clocks, *(ends[at + step] for step in self._awaited)])
        written, pause = 0, 1
        self._before = state
        if before is not None:
            moved = state - before
            if (moved == moved[0, 0]).all():
                written = self._write(one, at, one.count - number, float(moved[0, 0]), before)
            if written or number >= _PATIENCE:
                self._before, pause = None, max(1, number // 8)
        number += written
        if number + pause < one.count:
            self.next = one.first + (number + pause) * one.steps
        else:
            self._ahead.pop()
            self._begin()
        return at + written * one.steps

    def _write(self, one: Periods, at: int, count: int, shift: float, before: np.ndarray) -> int:
        """Write down as many of the ``count`` periods from step ``at`` on as go as the one before did, each
        later by ``shift`` seconds; returns how many.

        Args:
            before: the state in which the one before began.
        """
        simulation, first = self._simulation, at - one.steps
        if (host := simulation.hosts[0]) is not None:
            ran = self._ran(host, first, at, before)
            count = host.written_on(at, ran, count, shift)
        if not count:
            return 0
        end = at + count * one.steps
        later = shift * np.arange(1, count + 1)
        for times in (simulation.reached[0], simulation.left[0], simulation.start[0], simulation.end[0]):
            periods = times[at:end].reshape(count, one.steps, -1)
            np.add(times[first:at], later[:, None, None], out=periods)
        for number in (simulation.posted[0], simulation.ended[0]):
            number[at:end] = number[first:at] * count
        for clock in self._clocks:
            clock += later[-1]
        return count

    def _ran(self, host: HostClock, first: int, end: int, before: np.ndarray) -> list[Ran]:
        """How the host went through the pieces before the steps from ``first`` to ``end``."""
        (steps,), left = self._simulation.steps, self._simulation.left[0]
        stream, launching = before[:2]
        ran: list[Ran] = []
        for step in range(first, end):
            stream, launching = host.reach(step, stream, launching, slice(None), ran)
            if steps.kinds[step] == WAIT and steps.streams[step] == COMPUTE_STREAM:
                stream = left[step]
        return ran
