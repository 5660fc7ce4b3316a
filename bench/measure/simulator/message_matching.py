"""Matching of messages: pairs the sends, receives and collectives that the programs of a world post, before
any time is known.

Programs are static, so the k-th send from rank a to rank b meets the k-th receive on b from a, and the k-th
collective of a group on one member meets the k-th collective on the other members, whenever they happen.

The channels from a rank to each of its peers and the process groups are here too, with the seconds that their
messages take, and the time at which they are free again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import Group, Kind, Mesh, Program
from spbench.bench.measure.simulator.steps import Meeting, Steps


class Deadlock(ValueError):
    """Programs that cannot end, because a rank waits for a message that never comes."""


#: by (SEND or RECV, the peer's offset), the steps of that kind with that peer
_Posts = dict[tuple[int, tuple[int, ...]], list[int]]


def _posts(steps: Steps) -> _Posts:
    kinds, _, partners = steps.columns
    return {
        (kind, by): np.flatnonzero((kinds == kind) & (partners == peer)).tolist()
        for peer, by in enumerate(steps.program.peers)
        for kind in (Kind.SEND, Kind.RECV)
    }


def owners(programs: Sequence[Program], ranks_of: Sequence[Sequence[int]]) -> np.ndarray:
    """For each rank of the world, the index of the program that it runs.

    Raises:
        ValueError: the programs are of different meshes, or the ranks do not make up the mesh.
    """
    mesh, world = programs[0].mesh, programs[0].world
    if any(p.mesh != mesh for p in programs):
        raise ValueError(f"programs of different meshes: {', '.join(str(p.mesh) for p in programs)}")
    if sorted(rank for ranks in ranks_of for rank in ranks) != list(range(world)):
        raise ValueError(f"ranks_of must hold each rank of {world} once: {list(map(list, ranks_of))}")
    program_of = np.zeros(world, dtype=np.int64)
    for number, ranks in enumerate(ranks_of):
        program_of[list(ranks)] = number
    return program_of


class World:
    """All programs with the ranks that run them, and with their sends, receives and collectives matched.

    Args:
        programs: the distinct programs.
        program_of: for each rank of the world, the index of its program (see :func:`owners`).
        shifts: for each mesh axis, a number below which a rank's coordinate must be for the rank to be
            simulated; ranks a multiple of it further have equal times (see :func:`smallest_shifts`). If
            ``shifts`` is the mesh, all ranks are simulated.

    Attributes:
        size: the number of ranks of the world, simulated or not.
        stands_for: for each rank of the world, the simulated rank with equal times.
        program_of, place_of: for each rank of the world, its program, and the position in ``Steps.ranks`` of
            the simulated rank.
        meetings: by program, and by (SEND or RECV, index of the peer), where the messages meet.
        alike: by program, and by step of a collective, the step of the same collective in every program.

    Raises:
        Deadlock: a send has no receive, or a receive no send; names the rank and the event.
        ValueError: a send and its receive have different bytes.
    """

    def __init__(self, programs: Sequence[Program], program_of: np.ndarray, shifts: Mesh):
        self.size, self.program_of = len(program_of), program_of
        mesh, every = programs[0].mesh, np.arange(self.size)
        coordinates = zip(np.unravel_index(every, mesh), shifts, strict=True)
        self.stands_for = np.ravel_multi_index(tuple(c % shift for c, shift in coordinates), mesh)
        self.steps = []
        places = np.zeros(self.size, dtype=np.int64)
        for number, program in enumerate(programs):
            ranks = np.flatnonzero(program_of == number)
            self.steps.append(Steps(program, ranks, np.flatnonzero(self.stands_for[ranks] == ranks)))
            places[self.steps[-1].ranks] = np.arange(len(self.steps[-1].ranks))
        self.place_of = places[self.stands_for]
        posts = [_posts(steps) for steps in self.steps]
        self.meetings = [
            {
                (kind, peer): list(self._meet(number, kind, peer, posts))
                for kind in (Kind.SEND, Kind.RECV)
                for peer, by in enumerate(steps.program.peers)
                if posts[number][kind, by]
            }
            for number, steps in enumerate(self.steps)
        ]
        self.alike = self._align()

    def _meet(self, number: int, kind: int, peer: int, posts: list[_Posts]) -> Iterator[Meeting]:
        steps = self.steps[number]
        by = steps.program.peers[peer]
        own = posts[number][kind, by]
        back = tuple(-d % n for d, n in zip(by, steps.program.mesh, strict=True))
        ranks = steps.peers(peer)[steps.simulated]
        programs = self.program_of[ranks]
        for q in np.unique(programs).tolist():
            mine = np.flatnonzero(programs == q)
            theirs = np.full(len(steps.ranks), -1)
            theirs[mine] = self.place_of[ranks[mine]]
            halves = posts[q].get((Kind.RECV if kind == Kind.SEND else Kind.SEND, back), [])
            if len(halves) < len(own):
                what = "receive" if kind == Kind.SEND else "send"
                raise Deadlock(
                    f"{steps.describe(own[len(halves)], int(mine[0]))}: there is no matching {what}"
                )
            for step, other in zip(own, halves, strict=False):
                if self.steps[q].nbytes[other] != steps.nbytes[step]:
                    raise ValueError(
                        f"{steps.describe(step, int(mine[0]))} meets "
                        f"{self.steps[q].describe(other, int(theirs[mine[0]]))}: different bytes"
                    )
            yield Meeting(q, dict(zip(own, halves, strict=False)), theirs)

    def _align(self) -> list[dict[int, dict[int, int]]]:
        number_of: dict[Group, int] = {}  # there are many collectives, and few groups, which are slow to hash
        collectives: dict[int, list[dict[int, int]]] = defaultdict(list)
        alike: list[dict[int, dict[int, int]]] = []
        for number, steps in enumerate(self.steps):
            alike.append({})
            groups = [number_of.setdefault(group, len(number_of)) for group in steps.program.groups]
            begun: Counter[int] = Counter()
            for step in np.flatnonzero(steps.columns[0] == Kind.COLLECTIVE).tolist():
                group = groups[steps.partners[step]]
                if begun[group] == len(collectives[group]):
                    collectives[group].append({})
                alike[number][step] = collectives[group][begun[group]]
                alike[number][step][number] = step
                begun[group] += 1
        return alike


class Channel(NamedTuple):
    """The links of a program's simulated ranks to one peer, for a send; arrays are [simulated ranks].

    Attributes:
        latency: the latency in seconds.
        seconds: the seconds for the send's bytes.
        free: when the last transfer to the same peer ends, in seconds; the simulation sets it in place.
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
        """The channel of the send at a step of the program with that number."""
        steps = self._world.steps[number]
        peer, at_once, nbytes = steps.partners[step], steps.at_once[step], steps.nbytes[step]
        key = (number, peer, at_once, nbytes)
        if key not in self._found:
            # ranks that are not simulated use network cards too
            latency, per_byte = self._costs.transfers(
                steps.all_ranks.tolist(), steps.peers(peer).tolist(), at_once
            )
            free = self._free.setdefault((number, peer), np.zeros(len(steps.ranks)))
            self._found[key] = Channel(latency[steps.simulated], nbytes * per_byte[steps.simulated], free)
        return self._found[key]


class ProcessGroups:
    """The process groups of one kind to which the ranks of a program belong.

    Attributes:
        ranks: the global ranks of each group, for all ranks that run the program.
        simulated: for each simulated group, its index in ``ranks``.
        of: for each simulated rank of the program, the number of its simulated group.
        members: [simulated groups, size]: positions among the program's simulated ranks; None if groups
            differ in size or have members that run other programs.
        everywhere: for each simulated group, (program, positions of the members that run the program).
        free: for each simulated rank, when the last collective of its group ends, in seconds.
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
        for one in np.unique(of[steps.simulated]).tolist():
            stand = np.unique(world.stands_for[members[first[one]]])
            places = tuple(zip(world.program_of[stand].tolist(), world.place_of[stand].tolist(), strict=True))
            number_of[one] = found.setdefault(places, len(found))
            if len(found) > len(simulated):
                simulated.append(one)
        self.of, self.simulated = number_of[of[steps.simulated]], np.array(simulated)
        self.everywhere = [
            [(p, np.array([place for q, place in places if q == p])) for p in sorted({q for q, _ in places})]
            for places in found
        ]
        sizes = {len(places) for places in found}
        alike = len(sizes) == 1 and all(p == number for members in self.everywhere for p, _ in members)
        self.members = np.array([members[0][1] for members in self.everywhere]) if alike else None
        self.free = np.zeros(len(steps.ranks))

    def seconds(self, collective: str, nbytes: float) -> np.ndarray:
        """[simulated groups]: the seconds of one collective, while all groups run it at once."""
        key = (collective, nbytes)
        if key not in self._seconds:
            # groups that are not simulated use network cards too
            seconds = self._costs.collectives(collective, nbytes, self.ranks)
            self._seconds[key] = np.array(seconds)[self.simulated]
        return self._seconds[key]
