"""Matching of messages: pairs the sends, receives and collectives that the programs of a world post, before
any time is known.

Programs are static, so the k-th send from one rank to another meets the k-th receive there of that rank, and
the k-th collective of a group on one member meets the k-th on the others, whenever each happens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from spbench.bench.measure.simulator.periods import periods_of
from spbench.bench.measure.simulator.program import (
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    RECORD,
    RECV,
    SEND,
    WAIT,
    Group,
    Program,
    shifted_ranks,
)


class Deadlock(ValueError):
    """Programs that cannot end: a rank waits for something that never comes."""


@dataclass
class Steps:
    """A program without the kernels of its compute stream, and the ranks that run it.

    Attributes:
        all_ranks: global ranks that run it, in ascending order.
        ranks: those of them that are simulated, the first of ``all_ranks``.
        at: the program's event of each step; steps are what is not a kernel of the compute stream.
        kinds, streams, partners: of each step; a wait's partner is the step that it waits for.
        nbytes: bytes of each step's payload.
        at_once: of each send, to how many peers the sends go that are posted with it (nothing between them
            but other posts). Those to the same peer go one after another.
    """

    program: Program
    all_ranks: np.ndarray
    ranks: np.ndarray
    at: np.ndarray = field(init=False)
    kinds: list[int] = field(init=False)
    streams: list[int] = field(init=False)
    partners: list[int] = field(init=False)
    nbytes: list[float] = field(init=False)
    at_once: list[int] = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self.at = np.flatnonzero((program.kind != KERNEL) | (program.stream != COMPUTE_STREAM))
        step_of = np.full(len(program), -1)
        step_of[self.at] = np.arange(len(self.at))
        self.kinds = program.kind[self.at].tolist()
        self.streams = program.stream[self.at].tolist()
        partner = program.partner[self.at]
        waits = program.kind[self.at] == WAIT
        partner[waits] = step_of[partner[waits]]
        self.partners = partner.tolist()
        self.nbytes = program.nbytes[self.at].tolist()
        self.at_once = self._peers_at_once()

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``kinds``, ``streams`` and ``partners`` as arrays."""
        kinds, streams, partners = (
            np.array(x, dtype=np.int64) for x in (self.kinds, self.streams, self.partners)
        )
        return kinds, streams, partners

    def _peers_at_once(self) -> list[int]:
        kinds = self.program.kind[self.at]
        posts, sends = (kinds == SEND) | (kinds == RECV), kinds == SEND
        # a batch goes on where a post follows another with no event between them
        follows = np.diff(self.at, prepend=-2) == 1
        follows[1:] &= posts[:-1]
        batch = np.cumsum(posts & ~follows)[sends]
        partners = np.array(self.partners, dtype=np.int64)[sends]
        many = len(self.program.peers) or 1
        different = np.unique(batch * many + partners) // many
        at_once = np.ones(len(kinds), dtype=np.int64)
        at_once[sends] = np.bincount(different, minlength=1)[batch]
        return at_once.tolist()

    def peers(self, peer: int) -> np.ndarray:
        """The global rank that a peer, by the program's index of it, is for each of ``all_ranks``."""
        return shifted_ranks(self.all_ranks, self.program.peers[peer], self.program.mesh)

    def beside_computing(self, asked: bool) -> list[list[int]]:
        """For each step, if it is a wait of the compute stream, the collectives that it waits for and no wait
        before it did; those of another stream by the record of its point. Empty lists if not ``asked``."""
        found: list[list[int]] = [[]] * len(self)  # one list, which nothing is added to
        if not asked:
            return found
        #: collectives of each stream that the compute stream has not waited for
        ahead: dict[int, list[int]] = defaultdict(list)
        kinds, streams, partners = self.columns
        waits = (kinds == WAIT) & (streams == COMPUTE_STREAM)
        waits[waits] = np.isin(kinds[partners[waits]], (COLLECTIVE, RECORD))
        for step in np.flatnonzero((kinds == COLLECTIVE) | waits).tolist():
            kind, stream = self.kinds[step], self.streams[step]
            if kind == COLLECTIVE:
                ahead[stream].append(step)
            else:
                partner = self.partners[step]
                posted = ahead[self.streams[partner]]
                if self.kinds[partner] == RECORD:
                    found[step] = [each for each in posted if each < partner]
                elif partner in posted:
                    found[step] = [partner]
                posted[:] = [each for each in posted if each not in found[step]]
        return found

    def describe(self, step: int, local: int) -> str:
        """A step in words, with the rank."""
        rank = int(self.ranks[local])
        return f"rank {rank}, {self.program.describe(int(self.at[step]), rank)}"


@dataclass(frozen=True)
class Meeting:
    """Where the sends to a peer, or the receives from it, of some ranks of a program meet their other halves.

    Attributes:
        program: the one of the other halves.
        halves: by each of the steps, the other half's.
        theirs: for each position of my program, that of the other half's rank in the other program, or -1;
            ``everyone``: all of both programs meet.
        back: where everyone meets, for each position of the other program the one of mine.
    """

    program: int
    halves: dict[int, int]
    theirs: np.ndarray
    everyone: bool
    back: np.ndarray


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
    found = np.zeros(world, dtype=np.int64)
    for number, ranks in enumerate(ranks_of):
        found[list(ranks)] = number
    return found


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
        periods: by program, where it repeats itself; looked for if all ranks run one.

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
        alone = len(self.steps) == 1
        self.periods = [
            periods_of(steps, meetings) if alone else []
            for steps, meetings in zip(self.steps, self.meetings, strict=True)
        ]

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
