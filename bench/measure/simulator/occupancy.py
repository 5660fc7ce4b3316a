"""What a program's communication takes of a cluster, and when it is free again: channels from a rank to each
of its peers, and process groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import World


class Channel(NamedTuple):
    """What a send finds; each an array by position of the program's simulated ranks.

    Attributes:
        latency: in seconds.
        seconds: of the bytes on the link.
        free: when the transfer before it to the same peer has ended; to be set in place.
    """

    latency: np.ndarray
    seconds: np.ndarray
    free: np.ndarray


class Channels:
    """The channels that the programs' sends use."""

    def __init__(self, world: World, costs: Costs):
        self._world, self._costs = world, costs
        self._found: dict[tuple[int, int, int, float], Channel] = {}
        self._free: dict[tuple[int, int], np.ndarray] = {}

    def of(self, number: int, step: int) -> Channel:
        """What the send finds that is this step of that program."""
        steps = self._world.steps[number]
        peer, at_once, nbytes = steps.partners[step], steps.at_once[step], steps.nbytes[step]
        key = (number, peer, at_once, nbytes)
        if key not in self._found:
            # ranks that are not simulated take their share of the network cards too
            latency, per_byte = self._costs.transfers(
                steps.all_ranks.tolist(), steps.peers(peer).tolist(), at_once
            )
            simulated = slice(len(steps.ranks))
            free = self._free.setdefault((number, peer), np.zeros(len(steps.ranks)))
            self._found[key] = Channel(latency[simulated], nbytes * per_byte[simulated], free)
        return self._found[key]


class ProcessGroups:
    """The process groups of one kind that the ranks of a program belong to.

    Attributes:
        ranks: global ranks of each group, of all ranks that run the program.
        simulated: for each group that is simulated, the one of ``ranks`` that it is.
        of: the simulated group of each of the program's simulated ranks.
        members: [simulated groups, size] positions in the program, or None where other programs take part or
            sizes differ.
        everywhere: of each simulated group, for each program that members run, the positions of these, each
            once.
        free: when the last collective of each rank's group ended.
    """

    def __init__(self, world: World, costs: Costs, number: int, group: int):
        self._costs, self._seconds = costs, dict[tuple[str, float], np.ndarray]()
        steps = world.steps[number]
        members = steps.program.groups[group].members_by_rank(steps.all_ranks, steps.program.mesh)
        # groups of a kind have no rank in common, so that the first member tells them apart
        _, first, of = np.unique(members[:, 0], return_index=True, return_inverse=True)
        self.ranks: list[list[int]] = members[first].tolist()
        found: dict[tuple[tuple[int, int], ...], int] = {}
        simulated: list[int] = []
        number_of = np.zeros(len(first), dtype=np.int64)
        for one in np.unique(of[: len(steps.ranks)]).tolist():
            stand = np.unique(world.stands_for[members[first[one]]])
            places = tuple(zip(world.program_of[stand].tolist(), world.place_of[stand].tolist(), strict=True))
            number_of[one] = found.setdefault(places, len(found))
            if len(found) > len(simulated):
                simulated.append(one)
        self.of, self.simulated = number_of[of[: len(steps.ranks)]], np.array(simulated)
        self.everywhere = [
            [(p, np.array([place for q, place in places if q == p])) for p in sorted({q for q, _ in places})]
            for places in found
        ]
        sizes = {len(places) for places in found}
        alike = len(sizes) == 1 and all(p == number for members in self.everywhere for p, _ in members)
        self.members = np.array([members[0][1] for members in self.everywhere]) if alike else None
        self.free = np.zeros(len(steps.ranks))

    def seconds(self, collective: str, nbytes: float) -> np.ndarray:
        """Seconds of one collective that all groups run at once, by simulated group."""
        key = (collective, nbytes)
        if key not in self._seconds:
            # groups that are not simulated take their share of the network cards too
            seconds = self._costs.collectives(collective, nbytes, self.ranks)
            self._seconds[key] = np.array(seconds)[self.simulated]
        return self._seconds[key]
