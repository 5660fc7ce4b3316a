"""Ranks that run one program with unlike work, for example under a causal mask on contiguous chunks.

The program is that of the last rank of an axis, which has most work. The program marks its kernels for blocks
of lower ranks (:attr:`Program.whose`), so it determines the kernels of every other rank: rank r computes the
blocks of its r nearest lower ranks.

Messages are the same on all ranks, and the rank with most work sets their pace. So the world is simulated as
if all ranks had the last rank's work, which gives an upper bound of the step time. Then the computing, the
waits and the hidden communication of a lighter rank are computed from its own kernels, while the messages
keep their times.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from spbench.bench.measure.simulator.program import COMPUTE_STREAM, Kind
from spbench.bench.measure.simulator.steps import Steps
from spbench.bench.measure.simulator.waits import Times
from spbench.impls import ALL_LOWER, EVERYONE

#: the most steps x sets of ranks for which times are computed; beyond, a set has several coordinates
_MOST_TIMES = 2**19
#: the fewest sets of ranks
_FEWEST_SETS = 3
#: (global ranks that do the same work of a program; the coordinate, along the axis, of the rank whose work
#: they do, None: the whole program)
Alike = tuple[np.ndarray, int | None]


def odd_sets(count: int, most: int) -> list[list[int]]:
    """The numbers 0 to ``count`` - 1 in at most ``most`` sets: the first number by itself, the others in
    consecutive sets, each of an odd size if there are enough sets, its middle number first. If a quantity is
    linear in the number, the middle number has the mean of its set, so that weighted means are exact."""
    sets = [[0]]
    if count <= most:
        return [[i] for i in range(count)]
    parts = most - 1 if (count - most) % 2 == 0 else most - 2
    pairs = (count - 1 - parts) // 2
    sizes = [1 + 2 * (pairs * (i + 1) // parts - pairs * i // parts) for i in range(parts)]
    for start, end in pairwise(accumulate(sizes, initial=1)):
        middle = (start + end) // 2
        sets.append([middle, *range(start, middle), *range(middle + 1, end)])
    return sets


class UnlikeWork:
    """The share of a program's work that each rank does.

    Args:
        steps: the steps of the program.
        axis: the index of the mesh axis along which ranks have unlike work.
        last: the coordinate of the traced rank, which does the whole program.
    """

    def __init__(self, steps: Steps, axis: int, last: int):
        self.steps, self.last = steps, last
        program = steps.program
        #: for each of ``all_ranks``, its coordinate along the axis
        self.coordinates = np.unravel_index(steps.all_ranks, program.mesh)[axis]
        kernels = program.kind == Kind.KERNEL
        #: the kernels for blocks of lower ranks
        self.marked = np.flatnonzero((program.whose != EVERYONE) & kernels)
        whose = program.whose
        begins = (whose > 0) & (np.concatenate([[EVERYONE], whose[:-1]]) != whose)
        number = np.cumsum(begins)[self.marked] - 1
        blocks = np.maximum(whose[self.marked], 1)
        #: for each marked kernel, how many ranks back the block's owner is; 0: a kernel for all lower ranks
        self._back = np.where(whose[self.marked] == ALL_LOWER, 0, number % blocks + 1)

    def share(self, coordinate: int) -> np.ndarray:
        """[marked]: the share (0 to 1) of each :attr:`marked` kernel that the rank at a coordinate does."""
        joint = coordinate / self.last if self.last else 1.0
        return np.where(self._back == 0, joint, (self._back <= coordinate).astype(float))

    def weights(self, coordinate: int | None) -> np.ndarray:
        """[events]: the share (0 to 1) of each event that the rank at a coordinate does; None: all of it."""
        weights = np.ones(len(self.steps.program))
        if coordinate is not None:
            weights[self.marked] = self.share(coordinate)
        return weights

    @cached_property
    def mean_weights(self) -> np.ndarray:
        """[events]: the share (0 to 1) of each event that ranks do, in the mean over all ranks."""
        ranks = len(self.coordinates)
        # for each number of ranks back, how many ranks have a block there
        reach = ranks - np.searchsorted(np.sort(self.coordinates), np.arange(self.last + 1))
        joint = self.coordinates.sum() / self.last if self.last else ranks
        mean = np.ones(len(self.steps.program))
        mean[self.marked] = np.where(self._back == 0, joint, reach[self._back]) / ranks
        return mean

    def alike(self) -> list[Alike]:
        """All ranks in sets of ranks that do the same work: one set for each coordinate or, if the program is
        long, fewer sets of neighbours, whose times are those of the middle coordinate."""
        there = np.unique(self.coordinates)[::-1]
        if not len(self.marked) or len(there) == 1:
            return [(self.steps.all_ranks, None)]
        many = max(_FEWEST_SETS, _MOST_TIMES // max(1, len(self.steps)))
        return [
            (self.steps.all_ranks[np.isin(self.coordinates, there[each])], int(there[each[0]]))
            for each in odd_sets(len(there), many)
        ]

    def times(
        self, coordinate: int, taken: np.ndarray, times: Times, computed: np.ndarray
    ) -> tuple[Times, np.ndarray]:
        """(the times of the steps, the end of the compute stream) of the rank at a coordinate, if messages
        have the times in ``times``.

        Args:
            taken: [events]: seconds of each kernel, with the gap after the kernel.
            times: the times of one or several ranks that do all of the work.
            computed: when the compute stream of each of these ranks ends, in seconds.
        """
        steps, program = self.steps, self.steps.program
        kinds, streams, partners = steps.columns
        at = np.flatnonzero(streams == COMPUTE_STREAM)
        waits = kinds[at] == Kind.WAIT
        # each marked kernel lies before a step of the compute stream, or after the last one
        step = np.searchsorted(steps.at[at], self.marked)
        on_compute = program.stream[self.marked] == COMPUTE_STREAM
        left_out = np.where(on_compute, (1 - self.share(coordinate)) * taken[self.marked], 0.0)
        spared = np.bincount(step, weights=left_out, minlength=len(at) + 1)[:, None]
        reached = times.reached[at]
        left = np.where(waits[:, None], times.left[at], reached)
        begun = np.zeros_like(left[:1])
        before = np.concatenate([begun, left])
        passed = reached - before[:-1] - spared[:-1]
        ends = np.full_like(reached, -np.inf)
        ends[waits] = times.end[partners[at[waits]]]
        # seconds that a wait adds for Costs.overlap_loss, not for waiting
        lost = np.where(left > np.maximum(reached, ends), left - reached, 0.0)
        # the stream leaves a step after the work before it, and after the end of the awaited communication
        so_far = np.cumsum(passed + lost, axis=0)
        leaves = so_far + np.maximum(np.maximum.accumulate(ends - so_far, axis=0), 0.0)
        leaves_before = np.concatenate([begun, leaves])
        found_reached, found_left = times.reached.copy(), times.left.copy()
        found_reached[at], found_left[at[waits]] = leaves_before[:-1] + passed, leaves[waits]
        ended = leaves_before[-1] + computed - before[-1] - spared[-1]
        return times._replace(reached=found_reached, left=found_left), ended


def unlike_work(steps: Sequence[Steps], axis: int | None) -> list[UnlikeWork | None]:
    """For each program, the shares of its work that ranks do; None: every rank does the whole program."""
    if axis is None:
        return [None] * len(steps)
    works: list[UnlikeWork | None] = []
    for each in steps:
        last = int(np.unravel_index(each.all_ranks, each.program.mesh)[axis].max())
        works.append(UnlikeWork(each, axis, last) if (each.program.whose != EVERYONE).any() else None)
    return works
