"""The process groups of a world, as the simulation of collectives needs them."""

from __future__ import annotations

import numpy as np

from spbench.bench.simulator.message_matching import World


class ProcessGroups:
    """The process groups of one kind that the ranks of a program belong to.

    Attributes:
        ranks: global ranks of each group, of all ranks that run the program.
        simulated: for each group that is simulated, the one of ``ranks`` that it is.
        of: the simulated group of each of the program's simulated ranks.
        members: [simulated groups, size] positions in the program, or None where other programs take part or
            sizes differ.
        everywhere: (program, position) of each simulated group's members, each once.
        free: when the last collective of each rank's group ended.
    """

    def __init__(self, world: World, number: int, group: int):
        steps = world.steps[number]
        members = steps.program.groups[group].members_by_rank(steps.all_ranks, steps.program.mesh)
        # groups of a kind have no rank in common, so that the first member tells them apart
        _, first, of = np.unique(members[:, 0], return_index=True, return_inverse=True)
        self.ranks: list[list[int]] = members[first].tolist()
        found: dict[tuple[tuple[int, int], ...], int] = {}
        of_rank: list[int] = []
        simulated: list[int] = []
        for one in of[: len(steps.ranks)]:
            stand = np.unique(world.stands_for[members[first[one]]])
            places = tuple(zip(world.program_of[stand].tolist(), world.place_of[stand].tolist(), strict=True))
            of_rank.append(found.setdefault(places, len(found)))
            if len(found) > len(simulated):
                simulated.append(int(one))
        self.of, self.simulated = np.array(of_rank), np.array(simulated)
        self.everywhere = list(found)
        alike = all(p == number and len(m) == len(self.everywhere[0]) for m in self.everywhere for p, _ in m)
        self.members = np.array([[place for _, place in m] for m in self.everywhere]) if alike else None
        self.free = np.zeros(len(steps.ranks))
