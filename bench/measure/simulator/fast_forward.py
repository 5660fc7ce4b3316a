"""Fast-forward: periods of a program that change all clocks by the same, written down at once; and
the state of a simulation.

Where all ranks run one program, they are at the same step at once, and what comes later depends on few times:
the clocks of streams and hosts, the ends of communication that is waited for later, and when channels are
free. Times are sums and maxima of costs. So if a period has moved each of these by one and the same time, the
next does what this one did, so much later, and so do all after it while the program repeats
(:mod:`measure.simulator.steps`).

Two things make this exact, to the bit. Sums of floats depend on their order and on how large they have grown;
so the costs of a program with periods are whole ticks, of a power of two so small that a float holds the
whole step in ticks (:func:`measure.simulator.message_matching.tick_of`), and their sums have no rounding. And
hosts wait for what their devices did many periods ago; this is looked at for each period that is written down
(:meth:`HostClock.written_on`), and what would go otherwise is simulated.

The state of a simulation: when each rank is at the steps of its program, as far as that is known.
"""

from __future__ import annotations

import numpy as np

from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.host_clock import HostClock, Ran, host_seconds
from spbench.bench.measure.simulator.lighter_ranks import unlike_work
from spbench.bench.measure.simulator.message_matching import Channels, World, tick_of
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, KERNEL, SEND, WAIT
from spbench.bench.measure.simulator.steps import Periods


class SimulationState:
    """Arrays are [steps, ranks of the program]; nan: not yet.

    Args:
        unlike_axis: see :class:`Simulator`.
    """

    def __init__(self, world: World, costs: Costs, unlike_axis: int | None = None):
        self.world, self.steps = world, world.steps
        self.works = unlike_work(world.steps, unlike_axis)
        shapes = [(len(s), len(s.ranks)) for s in self.steps]
        #: when its stream reaches a step, and leaves a wait; when communication, or a kernel of a further
        #: stream, starts and ends
        self.reached, self.left, self.start, self.end = (
            [np.full(shape, np.nan) for shape in shapes] for _ in range(4)
        )
        #: of each step, how many ranks have posted it, and of how many it has an end
        self.posted, self.ended = ([[0] * len(s) for s in self.steps] for _ in range(2))
        #: when each stream has done what was issued so far; [streams, ranks of the program]
        self.clocks = [np.zeros((max(s.streams, default=0) + 1, len(s.ranks))) for s in self.steps]
        self.kernel_s = [costs.kernels(steps.program) for steps in self.steps]
        launched = [None if costs.host is None else host_seconds(costs.host, s.program) for s in self.steps]
        if any(world.periods):
            gaps = costs.launch_s * (self.steps[0].program.kind == KERNEL)
            costs = costs.in_ticks(tick_of(world, costs, self.kernel_s[0] + gaps, launched[0]))
            self.kernel_s = [costs.whole(self.kernel_s[0])]
        self.costs = costs
        #: by step: seconds of the kernel that it is, and of the compute stream's kernels before it
        self.taken: list[list[float]] = []
        self.before: list[list[float]] = []
        self.hosts: list[HostClock | None] = []
        for steps, seconds, work, periods in zip(
            self.steps, self.kernel_s, launched, world.periods, strict=True
        ):
            program = steps.program
            taken = np.where(program.kind == KERNEL, seconds + costs.launch_s, 0.0)
            spent = np.concatenate([[0.0], np.cumsum(np.where(program.stream == COMPUTE_STREAM, taken, 0.0))])
            self.taken.append(taken[steps.at].tolist())
            self.hosts.append(None if work is None else HostClock(costs, steps, taken, work, periods))
            self.before.append(np.diff(spent[steps.at], prepend=0.0, append=spent[-1]).tolist())
        self.losses = [steps.beside_computing(bool(costs.overlap_loss)) for steps in self.steps]
        self.channels = Channels(world, costs)


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
