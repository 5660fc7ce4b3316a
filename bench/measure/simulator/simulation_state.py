"""The state of a simulation: when each rank is at the steps of its program, as far as that is known."""

from __future__ import annotations

import numpy as np

from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.host_clock import HostClock, host_seconds
from spbench.bench.measure.simulator.lighter_ranks import unlike_work
from spbench.bench.measure.simulator.message_matching import Channels, World
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, KERNEL


class SimulationState:
    """When each rank is at the steps of its program, as far as that is known.

    Arrays are [steps, ranks of the program]; nan: not yet.

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
        self.costs = costs
        #: by step: seconds of the kernel that it is, and of the compute stream's kernels before it
        self.taken: list[list[float]] = []
        self.before: list[list[float]] = []
        self.hosts: list[HostClock | None] = []
        for steps, seconds, work in zip(self.steps, self.kernel_s, launched, strict=True):
            program = steps.program
            taken = np.where(program.kind == KERNEL, seconds + costs.launch_s, 0.0)
            spent = np.concatenate([[0.0], np.cumsum(np.where(program.stream == COMPUTE_STREAM, taken, 0.0))])
            self.taken.append(taken[steps.at].tolist())
            self.hosts.append(None if work is None else HostClock(costs, steps, taken, work))
            self.before.append(np.diff(spent[steps.at], prepend=0.0, append=spent[-1]).tolist())
        self.losses = [steps.beside_computing(bool(costs.overlap_loss)) for steps in self.steps]
        self.channels = Channels(world, costs)
