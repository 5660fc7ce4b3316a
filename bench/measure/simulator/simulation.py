"""The simulated timeline: when each rank of a world computes, communicates and waits, on a cluster.

Each rank has a compute stream, which runs its kernels in order and waits where the program waits, and the
further streams of its program, with kernels and waits of their own. A stream that waits for a record of
another stream continues when the other stream has reached the record. If the cluster has figures of its
hosts, each rank also has a host clock (:mod:`measure.simulator.steps`), and no event starts before its
launch. Without such figures launching costs no time, so streams run as far ahead as the waits allow.
Communication overlaps the stream that posts it. A transfer starts when both ends have posted it, and after
the previous transfer from the same rank to the same rank. A collective starts when its last member has posted
it, and after the group's previous collective. Kernels that overlap communication take longer by a share of
the communication's seconds (``overlap_loss``), which is added where the compute stream waits for it. So all
times are sums and maxima of costs, and a lower cost never makes a step longer.

Ranks that run the same program advance together, as arrays over ranks. If only some of them can continue (a
chain), the ranks part, and join again where the others have caught up. Ranks that a symmetry of the world
maps onto each other are simulated once (:mod:`measure.simulator.simulate`).
"""

from heapq import heappop, heappush

import numpy as np

from spbench.bench.errors import listed
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import Deadlock, ProcessGroups, World
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, Kind
from spbench.bench.measure.simulator.timeline import SimulationState, Timeline


class Simulation(SimulationState):
    """One simulation of a step, which :meth:`timeline` runs.

    Args:
        unlike_axis: see :class:`Simulator`.
    """

    def __init__(self, world: World, costs: Costs, unlike_axis: int | None = None):
        super().__init__(world, costs, unlike_axis)
        self._groups: dict[tuple[int, int], ProcessGroups] = {}
        #: by (program, group, name, bytes): the groups of a collective, and its seconds in each group
        self._collectives: dict[tuple[int, int, int, float], tuple[ProcessGroups, np.ndarray]] = {}
        #: (step, program) from which some ranks can continue; and these ranks, as a mask
        self._heap: list[tuple[int, int]] = []
        self._runnable: dict[tuple[int, int], np.ndarray] = {}
        #: by (program, awaited step), and by the step that waits: the waiting ranks, as a mask
        self._parked: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def timeline(self) -> Timeline:
        for number, steps in enumerate(self.steps):
            self._resume(number, 0, np.arange(len(steps.ranks)))
        while self._heap:
            step, number = heappop(self._heap)
            mask = self._runnable.pop((step, number))
            self._go_on(number, step, np.flatnonzero(mask))
        masks = ((key, np.any([*parked.values()], axis=0)) for key, parked in sorted(self._parked.items()))
        if waited := [
            self.steps[number].describe(step, place)
            for (number, step), mask in masks
            for place in np.flatnonzero(mask).tolist()
        ]:
            raise Deadlock(f"{listed(waited, 3, '; ')}: waited for, but never ends")
        for number, steps in enumerate(self.steps):
            posts = steps.columns[0] != Kind.WAIT
            for step, place in np.argwhere(np.isnan(self.end[number]) & posts[:, None]):
                raise Deadlock(f"{steps.describe(int(step), int(place))}: posted, but never ends")
        return Timeline(self)

    def _resume(self, number: int, step: int, who: np.ndarray) -> None:
        key = (step, number)
        if key not in self._runnable:
            self._runnable[key] = np.zeros(len(self.steps[number].ranks), dtype=bool)
            heappush(self._heap, key)
        self._runnable[key][who] = True

    def _go_on(self, number: int, step: int, who: np.ndarray) -> None:
        """Advance the ranks ``who`` of a program from a step, until a wait at which some rank must stop."""
        steps, before, host = self.steps[number], self.before[number], self.hosts[number]
        kinds, streams = steps.kinds, steps.streams
        reached, clocks = self.reached[number], self.clocks[number]
        index, larger = steps.index(who), steps.larger
        now = clocks[COMPUTE_STREAM, index]
        if host is not None:
            launching = host.now[index]
        heap = self._heap
        for at in range(step, len(kinds)):
            # other ranks of the program are at this step, or can catch up first, so all continue together
            if heap and heap[0][0] <= at and heap[0][1] == number:
                clocks[COMPUTE_STREAM, index] = now
                if host is not None:
                    host.now[index] = launching
                self._resume(number, at, who)
                return
            kind, stream = kinds[at], streams[at]
            if host is None:
                now = now + before[at]
                here = now if stream == COMPUTE_STREAM else clocks[stream, index]
            else:
                before_segment = now, launching
                now, launching = host.reach(at, now, launching, index)
                here = now if stream == COMPUTE_STREAM else clocks[stream, index]
                if kind not in (Kind.WAIT, Kind.RECORD):
                    here = larger(here, launching + host.latency)
            reached[at, index] = here
            if kind == Kind.WAIT:
                leaves = self._wait(number, at, who, here)
                if leaves is None:
                    if host is None:
                        clocks[COMPUTE_STREAM, index] = now - before[at]
                    else:
                        clocks[COMPUTE_STREAM, index], host.now[index] = before_segment
                    return
                if stream == COMPUTE_STREAM:
                    now = leaves
                else:
                    clocks[stream, index] = leaves
            else:
                self._post(number, at, who, here)
        if host is None:
            now = now + before[len(kinds)]
        else:
            now, host.now[index] = host.reach(len(kinds), now, launching, index)
        clocks[COMPUTE_STREAM, index] = now

    def _wait(self, number: int, at: int, who: np.ndarray, here: np.ndarray) -> np.ndarray | None:
        """[who]: when the ranks ``who`` leave a wait that they reach at the times ``here``, in seconds; None
        if some ranks cannot leave yet, and are parked."""
        steps, end = self.steps[number], self.end[number]
        index = steps.index(who)
        partner = steps.partners[at]
        ends = end[partner][index]
        if self.ended[number][partner] < len(steps.ranks) and (late := np.isnan(ends)).any():
            self._part(number, at, who, np.atleast_1d(late))
            return None
        if lost := self.losses[number][at]:
            lasted = sum(end[each][index] - self.start[number][each][index] for each in lost)
            here = here + self.costs.overlap_loss * lasted
        self.left[number][at, index] = here = steps.larger(here, ends)
        return here

    def _post(self, number: int, at: int, who: np.ndarray, here: np.ndarray) -> None:
        """Begin the kernel of a further stream, the record or the communication that the ranks ``who`` reach
        at the times ``here``."""
        steps = self.steps[number]
        kind = steps.kinds[at]
        if kind in (Kind.KERNEL, Kind.RECORD):
            index = steps.index(who)
            self.start[number][at, index] = here
            self.end[number][at, index] = here = here + self.taken[number][at]
            self.ended[number][at] += len(who)
            if kind == Kind.KERNEL:
                self.clocks[number][steps.streams[at], index] = here
            return
        self.posted[number][at] += len(who)
        if kind == Kind.COLLECTIVE:
            self._gather(number, at, who)
        else:
            self._meet(number, at, who)

    def _part(self, number: int, at: int, who: np.ndarray, late: np.ndarray) -> None:
        """Let ranks at a wait continue, except the ``late`` ranks, which are parked until the awaited
        communication has ended."""
        if not late.all():
            self._resume(number, at, who[~late])
        waiting = self._parked.setdefault((number, self.steps[number].partners[at]), {})
        if at not in waiting:
            waiting[at] = np.zeros(len(self.steps[number].ranks), dtype=bool)
        waiting[at][who[late]] = True

    def _ended(self, number: int, step: int, who: np.ndarray) -> None:
        """Note that a step's end is known for the ranks ``who``, and wake those that wait for it."""
        self.ended[number][step] += len(who)
        if (number, step) not in self._parked:
            return
        for at, waiting in self._parked[number, step].items():
            if len(ready := who[waiting[who]]):
                waiting[ready] = False
                self._resume(number, at, ready)

    # -- transfers -------------------------------------------------------------------------------------

    def _meet(self, number: int, step: int, who: np.ndarray) -> None:
        """Start the transfers of the ranks ``who`` whose peers have posted the receive or send too."""
        steps = self.steps[number]
        kind = steps.kinds[step]
        for meeting in self.world.meetings[number][kind, steps.partners[step]]:
            other, other_step = meeting.program, meeting.halves[step]
            if not self.posted[other][other_step]:
                continue
            theirs = meeting.theirs[who]
            posted = self.reached[other][other_step][theirs]
            ready = (theirs >= 0) & ~np.isnan(posted)
            if not ready.any():
                continue
            mine, theirs, posted = who[ready], theirs[ready], posted[ready]
            sender, send, at = (number, step, mine) if kind == Kind.SEND else (other, other_step, theirs)
            latency, seconds, free = self.channels.of(sender, send)
            start = np.maximum(np.maximum(self.reached[number][step][mine], posted), free[at])
            free[at] = end = start + latency[at] + seconds[at]
            for p, s, ranks in ((number, step, mine), (other, other_step, theirs)):
                self.start[p][s, ranks] = start
                self.end[p][s, ranks] = end
                self._ended(p, s, ranks)

    # -- collectives -------------------------------------------------------------------------------------

    def _gather(self, number: int, step: int, who: np.ndarray) -> None:
        """Start each collective of the ranks ``who`` that all members of its group have posted."""
        steps = self.steps[number]
        key = (number, steps.partners[step], steps.names[step], steps.nbytes[step])
        if key not in self._collectives:
            groups = self._groups_of(number, step)
            seconds = groups.seconds(steps.program.names[steps.names[step]], steps.nbytes[step])
            self._collectives[key] = groups, seconds
        groups, cost = self._collectives[key]
        if groups.members is not None and self.posted[number][step] == len(steps.ranks) == len(who):
            if len(who) == 1:  # arithmetic on numbers takes less time than on arrays of one
                start_s = max(self.reached[number][step, 0], groups.free[0])
                self.start[number][step, 0] = start_s
                self.end[number][step, 0] = groups.free[0] = start_s + cost[0]
                self._ended(number, step, who)
                return
            ready = np.maximum(self.reached[number][step], groups.free)[groups.members].max(1)
            end = ready + cost
            self.start[number][step] = ready[groups.of]
            self.end[number][step] = groups.free = end[groups.of]
            self._ended(number, step, who)
            return
        alike = self.world.alike[number][step]
        for group in np.unique(groups.of[who]).tolist():
            members = groups.everywhere[group]
            if any(p not in alike or np.isnan(self.reached[p][alike[p], at]).any() for p, at in members):
                continue
            # the end of the group's collective before this one is noted at each of its members
            own = next(at for p, at in members if p == number)
            ready_s = max(float(self.reached[p][alike[p], at].max()) for p, at in members)
            start_s = max(ready_s, float(groups.free[own[0]]))
            for p, at in members:
                self.start[p][alike[p], at] = start_s
                self.end[p][alike[p], at] = start_s + cost[group]
                self._groups_of(p, alike[p]).free[at] = start_s + cost[group]
                self._ended(p, alike[p], at)

    def _groups_of(self, number: int, step: int) -> ProcessGroups:
        key = (number, self.steps[number].partners[step])
        if key not in self._groups:
            self._groups[key] = ProcessGroups(self.world, self.costs, *key)
        return self._groups[key]
