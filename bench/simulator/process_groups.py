"""The process groups of a world, as the simulation of collectives needs them."""

from __future__ import annotations

import numpy as np

from spbench.bench.simulator.message_matching import World


class ProcessGroups:
    """The process groups of one kind that the ranks of a program belong to.

    Attributes:
        ranks: global ranks of each group.
        of: the group of each of the program's ranks.
        members: [groups, size] positions in the program, or None where other programs take part.
        everywhere: (program, position) of each group's members.
        free: when the last collective of each rank's group ended.
    """

    def __init__(self, world: World, number: int, group: int):
        steps = world.steps[number]
        kind, mesh = steps.program.groups[group], steps.program.mesh
        found: dict[tuple[int, ...], int] = {}
        of = [found.setdefault(kind.members(int(rank), mesh), len(found)) for rank in steps.ranks]
        self.ranks = list(found)
        self.of = np.array(of)
        self.everywhere = [
            [(int(world.program_of[r]), int(world.place_of[r])) for r in members] for members in self.ranks
        ]
        inside = all(p == number for members in self.everywhere for p, _ in members)
        self.members = np.array([[place for _, place in m] for m in self.everywhere]) if inside else None
        self.free = np.zeros(len(steps.ranks))
