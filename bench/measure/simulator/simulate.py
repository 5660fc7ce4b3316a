"""The time of a world's step on a cluster, under any calibration of the cluster.

If the world has a symmetry, ranks with equal times are simulated once (folding).

Let every rank take the place of the rank p further along a mesh axis, round the end. If every rank has in its
new place the same program, and the same process groups, node and part of a node up to their numbers, then all
ranks that are a multiple of p apart along the axis have equal times, because their times are sums and maxima
of equal costs. So it is enough to simulate the first p ranks along each axis. The cost of a transfer or a
collective depends on all ranks that share a network card or a link out of a part of a node, so costs are
always computed for the whole world.
"""

from collections.abc import Sequence

import numpy as np

from spbench.bench.measure.clusters.card_kernels import check_rates
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.simulator.costs import Costs, node_of
from spbench.bench.measure.simulator.group_links import crossings_of
from spbench.bench.measure.simulator.message_matching import World, owners
from spbench.bench.measure.simulator.program import Group, Mesh, Program, shifted_ranks
from spbench.bench.measure.simulator.simulation import Simulation
from spbench.bench.measure.simulator.timeline import Timeline


class Simulator:
    """A world on a cluster, whose messages are matched once and which can be timed under any calibration.

    Args:
        programs: the distinct programs.
        ranks_of: for each program, the global ranks that run it.
        precision: the precision whose rates must be known, and whose calibration is the default.
        parameters: the number of parameters of the whole model, for which a calibration may charge.
        attention: the model's kernel of softmax attention, see :class:`AttentionRates`.
        fold: simulate only one of all ranks that a symmetry of the world maps onto each other. The timeline
            is the same.
        unlike_axis: the index of the mesh axis along which ranks of one program have unlike work
            (:mod:`measure.simulator.lighter_ranks`); the last rank runs all of it. None: there is none.
        graphs: see :func:`host_seconds`.

    Raises:
        Deadlock, ValueError: see :class:`World` and :func:`owners`.
        RatesUnknown: the profile lacks a figure.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        ranks_of: Sequence[Sequence[int]],
        cluster: Cluster,
        precision: str = "fp32",
        parameters: int = 0,
        fold: bool = True,
        attention: str = "flash",
        unlike_axis: int | None = None,
        graphs: str = "none",
    ):
        program_of = owners(programs, ranks_of)
        check_rates(cluster, precision, len(program_of))
        shifts = smallest_shifts(programs, program_of, cluster) if fold else programs[0].mesh
        self.world = World(programs, program_of, shifts)
        self.cluster, self.precision, self.parameters = cluster, precision, parameters
        self.attention, self.unlike_axis, self.graphs = attention, unlike_axis, graphs

    def __call__(self, calibration: Calibration | None = None) -> Timeline:
        """The timeline of the step. ``calibration``: None for the cluster's own, for the precision.

        Raises:
            Deadlock: ranks wait for each other in a circle.
        """
        if calibration is None:
            calibration = self.cluster.calibration_of(self.precision)
        costs = Costs(self.cluster, calibration, self.parameters, self.attention, self.graphs)
        return Simulation(self.world, costs, self.unlike_axis).timeline()


def smallest_shifts(programs: Sequence[Program], program_of: np.ndarray, cluster: Cluster) -> Mesh:
    """For each mesh axis, the smallest divisor p of its number of ranks such that ranks p apart have equal
    times; the number of ranks itself if there is no smaller one.

    Args:
        programs: the distinct programs.
        program_of: for each rank of the world, the index of its program.
        cluster: the cluster whose nodes the ranks fill in order.
    """
    mesh, ranks = programs[0].mesh, np.arange(len(program_of))
    nodes = [node_of(ranks, cluster), *(ranks // each.devices for each in crossings_of(cluster))]

    def is_symmetric(image: np.ndarray) -> bool:
        """Whether programs, nodes and groups stay if each rank of the world takes the place ``image`` has."""
        same = np.array_equal(program_of[image], program_of)
        return (
            same
            # images of ranks share a node exactly if the ranks do
            and all(len(np.unique([each, each[image]], axis=1).T) == len(np.unique(each)) for each in nodes)
            and all(
                keeps_groups(group, program, np.flatnonzero(program_of == number), image)
                for number, program in enumerate(programs)
                for group in program.groups
            )
        )

    def smallest(axis: int) -> int:
        for p in (p for p in range(1, mesh[axis]) if mesh[axis] % p == 0):
            if is_symmetric(shifted_ranks(ranks, [p * (each == axis) for each in range(len(mesh))], mesh)):
                return p
        return mesh[axis]

    return tuple(map(smallest, range(len(mesh))))


def keeps_groups(group: Group, program: Program, ranks: np.ndarray, image: np.ndarray) -> bool:
    """Whether each rank is a member of its group, and the images of the group's members form the group of the
    rank's image."""
    members = group.members_by_rank(ranks, program.mesh)
    if not (members == ranks[:, None]).any(1).all():
        return False
    # groups with the same first member are the same group
    _, some = np.unique(members[:, 0], return_index=True)
    theirs = group.members_by_rank(image[ranks[some]], program.mesh)
    return np.array_equal(np.sort(image[members[some]], axis=1), np.sort(theirs, axis=1))
