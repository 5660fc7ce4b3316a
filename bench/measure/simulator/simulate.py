"""The time of a world's step on a cluster, under any calibration of it.

Ranks that do the same at the same times are simulated once (folding), where the world has a symmetry.

Let every rank r take the place of rank r + p, the last p those of the first. If each then finds in its new
place the program, peers, process groups, node and part of a node that it had, only under other numbers, all
ranks that are a multiple of p apart have equal times: these are sums and maxima of the same costs. So p of
them are enough to simulate. What a transfer or collective costs depends on all that share a network card or
the way out of a part; costs are therefore those of the whole world.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.simulator.costs import Costs, node_of
from spbench.bench.measure.simulator.crossings import crossings_of
from spbench.bench.measure.simulator.message_matching import World, owners
from spbench.bench.measure.simulator.needed_rates import check_rates
from spbench.bench.measure.simulator.program import Group, Program, shifted_ranks
from spbench.bench.measure.simulator.simulation import Simulation
from spbench.bench.measure.simulator.timeline import Timeline


class Simulator:
    """A world on a cluster, ready to be timed under any calibration without matching it up anew.

    Args:
        programs: one for each distinct program.
        ranks_of: global ranks that run each.
        precision: whose rates must be known, and whose calibration of the cluster is the default.
        parameters: of the whole model, which a calibration may charge for.
        attention: the model's kernel of softmax attention, see :class:`AttentionRates`.
        fold: simulate only ranks that a shift of the world does not map onto each other, where there is such
            a shift. The timeline is the same.
        unlike_axis: of the mesh, along which ranks of one program have unlike work
            (:mod:`measure.simulator.lighter_ranks`); the last of them runs all of it. None: nowhere.

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
    ):
        program_of = owners(programs, ranks_of)
        check_rates(cluster, precision, len(program_of))
        shift = smallest_shift(programs, program_of, cluster) if fold else len(program_of)
        self.world = World(programs, program_of, shift)
        self.cluster, self.precision, self.parameters = cluster, precision, parameters
        self.attention, self.unlike_axis = attention, unlike_axis

    def __call__(self, calibration: Calibration | None = None) -> Timeline:
        """The timeline; without a calibration, with the cluster's own for the precision.

        Raises:
            Deadlock: ranks wait for each other in a circle.
        """
        if calibration is None:
            calibration = self.cluster.calibration_of(self.precision)
        costs = Costs(self.cluster, calibration, self.parameters, self.attention)
        return Simulation(self.world, costs, self.unlike_axis).timeline()


def smallest_shift(programs: Sequence[Program], program_of: np.ndarray, cluster: Cluster) -> int:
    """The smallest p of which the world is a multiple, such that ranks r, r + p, r + 2p, ... have equal
    times; the size of the world if there is none below it.

    Args:
        programs: each distinct one.
        program_of: for each rank of the world, the index of its program.
        cluster: whose nodes the ranks fill in order.
    """
    world = len(program_of)
    ranks = np.arange(world)
    nodes = [node_of(ranks, cluster), *(ranks // each.devices for each in crossings_of(cluster))]
    shifts = (p for p in range(1, world) if world % p == 0)
    return next((p for p in shifts if is_symmetric(programs, program_of, nodes, p)), world)


def is_symmetric(
    programs: Sequence[Program], program_of: np.ndarray, nodes: Sequence[np.ndarray], p: int
) -> bool:
    """Whether the shift of all ranks by p, round the world, maps programs, nodes, peers and groups onto
    themselves.

    Args:
        program_of: of each rank of the world.
        nodes: of each rank of the world, its node, and each part of that which it is in.
    """
    image = np.roll(np.arange(len(program_of)), -p)
    same = np.array_equal(program_of[image], program_of)
    if not (same and all(keeps_nodes(each, image) for each in nodes)):
        return False
    for number, program in enumerate(programs):
        ranks = np.flatnonzero(program_of == number)
        if not all(keeps_peers(by, program, ranks, image) for by in program.peers):
            return False
        if not all(keeps_groups(group, program, ranks, image) for group in program.groups):
            return False
    return True


def keeps_nodes(nodes: np.ndarray, image: np.ndarray) -> bool:
    """Whether ranks that share a node have images that share a node, and others have not.

    Args:
        nodes: of each rank of the world.
        image: of each rank of the world, another or the same; a permutation.
    """
    return len(np.unique(np.stack([nodes, nodes[image]]), axis=1).T) == len(np.unique(nodes))


def keeps_peers(by: tuple[int, ...], program: Program, ranks: np.ndarray, image: np.ndarray) -> bool:
    """Whether the image of the peer that far away is, for each of the ranks, the peer of its image."""
    mesh = program.mesh
    return np.array_equal(image[shifted_ranks(ranks, by, mesh)], shifted_ranks(image[ranks], by, mesh))


def keeps_groups(group: Group, program: Program, ranks: np.ndarray, image: np.ndarray) -> bool:
    """Whether the image of each rank's group is, for each of the ranks, the group of its image, and each rank
    is a member of its own."""
    members = group.members_by_rank(ranks, program.mesh)
    if not (members == ranks[:, None]).any(1).all():
        return False
    # ranks with one first member have one group
    _, some = np.unique(members[:, 0], return_index=True)
    theirs = group.members_by_rank(image[ranks[some]], program.mesh)
    return np.array_equal(np.sort(image[members[some]], axis=1), np.sort(theirs, axis=1))
