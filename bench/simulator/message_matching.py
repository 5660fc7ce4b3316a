"""Matching of messages: pairs the sends, receives and collectives that the programs of a world post, before
any time is known.

Programs are static, so the k-th send from one rank to another meets the k-th receive there of that rank, and
the k-th collective of a group on one member meets the k-th on the others, whenever each happens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spbench.bench.simulator.program import COLLECTIVE, KERNEL, RECV, SEND, WAIT, Group, Program, shifted


class Deadlock(ValueError):
    """Programs that cannot end: a rank waits for something that never comes."""


@dataclass
class Steps:
    """A program without its kernels, and the ranks that run it.

    Attributes:
        at: the program's event of each step; steps are what is not a kernel.
        kinds, partners: of each step; a wait's partner is the step that it waits for.
        nbytes: bytes of each step's payload.
        batch: of each send, how many of the sends posted with it (nothing between them but other posts).
        peers: by the program's index of a peer, the global rank that it is for each rank.
    """

    program: Program
    ranks: np.ndarray
    at: np.ndarray = field(init=False)
    kinds: list[int] = field(init=False)
    partners: list[int] = field(init=False)
    nbytes: list[float] = field(init=False)
    batch: list[int] = field(init=False)
    peers: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self.at = np.flatnonzero(program.kind != KERNEL)
        step_of = np.full(len(program), -1)
        step_of[self.at] = np.arange(len(self.at))
        self.kinds = program.kind[self.at].tolist()
        partner = program.partner[self.at]
        waits = program.kind[self.at] == WAIT
        partner[waits] = step_of[partner[waits]]
        self.partners = partner.tolist()
        self.nbytes = program.nbytes[self.at].tolist()
        self.peers = [
            np.array([shifted(int(rank), by, program.mesh) for rank in self.ranks]) for by in program.peers
        ]
        self.batch = self._batches()

    def __len__(self) -> int:
        return len(self.kinds)

    def _batches(self) -> list[int]:
        batch = [1] * len(self.kinds)
        start = 0
        for step in range(len(self.kinds) + 1):
            ends = step == len(self.kinds) or self.kinds[step] not in (SEND, RECV)
            if ends or (step > start and self.at[step] != self.at[step - 1] + 1):
                sends = [s for s in range(start, step) if self.kinds[s] == SEND]
                for s in sends:
                    batch[s] = len(sends)
                start = step + 1 if ends else step
        return batch

    def describe(self, step: int, local: int) -> str:
        """A step in words, with the rank."""
        rank = int(self.ranks[local])
        return f"rank {rank}, {self.program.describe(int(self.at[step]), rank)}"


@dataclass(frozen=True)
class Meeting:
    """Where a send or receive of some ranks of a program meets its other half.

    Attributes:
        program, step: the other half.
        mine, theirs: positions of the ranks in their programs; ``everyone``: all of mine, in order.
    """

    program: int
    step: int
    mine: np.ndarray
    theirs: np.ndarray
    everyone: bool


#: by SEND or RECV and the peer's offset, the steps that are that
_Posts = dict[tuple[int, tuple[int, ...]], list[int]]


def _posts(steps: Steps) -> _Posts:
    found: _Posts = defaultdict(list)
    for step, kind in enumerate(steps.kinds):
        if kind in (SEND, RECV):
            found[kind, steps.program.peers[steps.partners[step]]].append(step)
    return found


class World:
    """All programs with the ranks that run them, and their sends, receives and collectives in pairs and
    groups.

    Attributes:
        meetings: by program and step of a send or receive, the steps of other programs that are its other
            half.
        alike: by program and step of a collective, the step of every program of the same collective.

    Raises:
        Deadlock: a send without its receive, or the reverse; the rank and event.
        ValueError: the ranks do not make up the mesh, or two halves disagree about the bytes.
    """

    def __init__(self, programs: Sequence[Program], ranks_of: Sequence[Sequence[int]]):
        self.steps = [Steps(p, np.array(r)) for p, r in zip(programs, ranks_of, strict=True)]
        mesh = programs[0].mesh
        if any(p.mesh != mesh for p in programs):
            raise ValueError(f"programs of different meshes: {', '.join(str(p.mesh) for p in programs)}")
        world = programs[0].world
        if sorted(rank for ranks in ranks_of for rank in ranks) != list(range(world)):
            raise ValueError(f"ranks_of must hold each rank of {world} once: {list(map(list, ranks_of))}")
        self.size = world
        self.program_of = np.zeros(world, dtype=np.int64)
        self.place_of = np.zeros(world, dtype=np.int64)
        for number, steps in enumerate(self.steps):
            self.program_of[steps.ranks] = number
            self.place_of[steps.ranks] = np.arange(len(steps.ranks))
        posts = [_posts(steps) for steps in self.steps]
        self.meetings = [self._meet(i, posts) for i in range(len(self.steps))]
        self.alike = self._align()

    def _meet(self, number: int, posts: list[_Posts]) -> dict[int, list[Meeting]]:
        steps = self.steps[number]
        mesh = steps.program.mesh
        found: dict[int, list[Meeting]] = {}
        counts: dict[tuple[int, int], int] = defaultdict(int)
        pairs: dict[int, list[tuple[int, np.ndarray, np.ndarray]]] = {}
        for peer, ranks in enumerate(steps.peers):
            owners = self.program_of[ranks]
            pairs[peer] = [
                (int(q), mine := np.flatnonzero(owners == q), self.place_of[ranks[mine]])
                for q in np.unique(owners)
            ]
        for step, kind in enumerate(steps.kinds):
            if kind not in (SEND, RECV):
                continue
            peer = steps.partners[step]
            ordinal = counts[kind, peer]
            counts[kind, peer] += 1
            back = tuple(-d % n for d, n in zip(steps.program.peers[peer], mesh, strict=True))
            found[step] = []
            for q, mine, theirs in pairs[peer]:
                others = posts[q][RECV if kind == SEND else SEND, back]
                if ordinal >= len(others):
                    what = "receive" if kind == SEND else "send"
                    raise Deadlock(f"{steps.describe(step, int(mine[0]))}: there is no matching {what}")
                other = others[ordinal]
                if self.steps[q].nbytes[other] != steps.nbytes[step]:
                    raise ValueError(
                        f"{steps.describe(step, int(mine[0]))} meets "
                        f"{self.steps[q].describe(other, int(theirs[0]))}: different bytes"
                    )
                found[step].append(Meeting(q, other, mine, theirs, len(mine) == len(steps.ranks)))
        return found

    def _align(self) -> list[dict[int, dict[int, int]]]:
        by_group: list[dict[Group, list[int]]] = []
        for steps in self.steps:
            found: dict[Group, list[int]] = defaultdict(list)
            for step, kind in enumerate(steps.kinds):
                if kind == COLLECTIVE:
                    found[steps.program.groups[steps.partners[step]]].append(step)
            by_group.append(found)
        return [
            {
                step: {
                    i: other[group][k] for i, other in enumerate(by_group) if k < len(other.get(group, ()))
                }
                for group, own in found.items()
                for k, step in enumerate(own)
            }
            for found in by_group
        ]
