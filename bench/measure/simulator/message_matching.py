"""Matching of messages: pairs the sends, receives and collectives that the programs of a world post, before
any time is known.

Programs are static, so the k-th send from one rank to another meets the k-th receive there of that rank, and
the k-th collective of a group on one member meets the k-th on the others, whenever each happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from spbench.bench.measure.simulator.program import COLLECTIVE, RECV, SEND, Group, Program
from spbench.bench.measure.simulator.steps import Meeting, Steps


class Deadlock(ValueError):
    """Programs that cannot end: a rank waits for something that never comes."""


#: by SEND or RECV and the peer's offset, the steps that are that
_Posts = dict[tuple[int, tuple[int, ...]], list[int]]


def _posts(steps: Steps) -> _Posts:
    kinds, _, partners = steps.columns
    return {
        (kind, by): np.flatnonzero((kinds == kind) & (partners == peer)).tolist()
        for peer, by in enumerate(steps.program.peers)
        for kind in (SEND, RECV)
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
    """All programs with the ranks that run them, and their sends, receives and collectives in pairs and
    groups.

    Args:
        programs: each distinct one.
        program_of: for each rank of the world, the index of its program (see :func:`owners`).
        shift: only ranks below it are simulated; rank r does what rank r % shift does (see
            :func:`smallest_shift`). The size of the world: all are simulated.

    Attributes:
        size: ranks of the world, simulated or not.
        stands_for: for each rank of the world, the simulated rank that does the same.
        program_of, place_of: for each rank of the world, its program, and the position in ``Steps.ranks`` of
            the simulated rank.
        meetings: by program, and by (SEND or RECV, index of the peer), the other halves.
        alike: by program and step of a collective, the step of every program of the same collective.

    Raises:
        Deadlock: a send without its receive, or the reverse; the rank and event.
        ValueError: two halves disagree about the bytes.
    """

    def __init__(self, programs: Sequence[Program], program_of: np.ndarray, shift: int):
        self.size, self.program_of = len(program_of), program_of
        self.stands_for = np.arange(self.size) % shift
        self.steps = []
        places = np.zeros(shift, dtype=np.int64)
        for number, program in enumerate(programs):
            ranks = np.flatnonzero(program_of == number)
            simulated = ranks[ranks < shift]
            places[simulated] = np.arange(len(simulated))
            self.steps.append(Steps(program, ranks, simulated))
        self.place_of = places[self.stands_for]
        posts = [_posts(steps) for steps in self.steps]
        self.meetings = [
            {
                (kind, peer): list(self._meet(number, kind, peer, posts))
                for kind in (SEND, RECV)
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
        ranks = steps.peers(peer)[: len(steps.ranks)]
        programs = self.program_of[ranks]
        for q in np.unique(programs).tolist():
            mine = np.flatnonzero(programs == q)
            theirs = np.full(len(steps.ranks), -1)
            theirs[mine] = self.place_of[ranks[mine]]
            halves = posts[q].get((RECV if kind == SEND else SEND, back), [])
            if len(halves) < len(own):
                what = "receive" if kind == SEND else "send"
                raise Deadlock(
                    f"{steps.describe(own[len(halves)], int(mine[0]))}: there is no matching {what}"
                )
            for step, other in zip(own, halves, strict=False):
                if self.steps[q].nbytes[other] != steps.nbytes[step]:
                    raise ValueError(
                        f"{steps.describe(step, int(mine[0]))} meets "
                        f"{self.steps[q].describe(other, int(theirs[mine[0]]))}: different bytes"
                    )
            everyone = len(steps.ranks) == len(mine) == len(self.steps[q].ranks)
            matched = dict(zip(own, halves, strict=False))
            yield Meeting(q, matched, theirs, everyone, np.argsort(theirs))

    def _align(self) -> list[dict[int, dict[int, int]]]:
        collectives: dict[Group, list[dict[int, int]]] = defaultdict(list)
        alike: list[dict[int, dict[int, int]]] = []
        for number, steps in enumerate(self.steps):
            alike.append({})
            begun: Counter[Group] = Counter()
            for step in np.flatnonzero(steps.columns[0] == COLLECTIVE).tolist():
                group = steps.program.groups[steps.partners[step]]
                if begun[group] == len(collectives[group]):
                    collectives[group].append({})
                alike[number][step] = collectives[group][begun[group]]
                alike[number][step][number] = step
                begun[group] += 1
        return alike
