"""Steps: a program without the kernels of its compute stream, and what its messages meet.

Periods of a step program: where it does the same again and again, as a ring does hop by hop.

They are found by the program alone, whatever its events cost. Candidates are runs of blocks, from one send to
the next, whose digests repeat; each is then compared in every column.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from spbench.bench.measure.simulator.program import (
    COLLECTIVE,
    COMPUTE_STREAM,
    KERNEL,
    RECORD,
    RECV,
    SEND,
    WAIT,
    Program,
    shifted_ranks,
)


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
        awaited: list[list[int]] = [[]] * len(self)  # one list, which nothing is added to
        if not asked:
            return awaited
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
                    awaited[step] = [each for each in posted if each < partner]
                elif partner in posted:
                    awaited[step] = [partner]
                posted[:] = [each for each in posted if each not in awaited[step]]
        return awaited

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


#: the fewest periods that are looked at, and the most sends of one
LEAST, MOST_SENDS = 32, 8
#: odd, as multipliers of digests must be
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Periods:
    """A run of steps that are the same ``count`` times: events, payloads, what is waited for how far back.
    No period has a collective, and its messages meet each other.

    Attributes:
        first, steps: the step with which the run begins, and the steps of a period.
        event, events: the event with which it begins, and the events of a period.
    """

    first: int
    steps: int
    event: int
    events: int
    count: int

    @property
    def end(self) -> int:
        """The step after the last period."""
        return self.first + self.count * self.steps

    @property
    def end_event(self) -> int:
        return self.event + self.count * self.events


def periods_of(steps: Steps, meetings: dict[tuple[int, int], list[Meeting]]) -> list[Periods]:
    """The periods of a program that all ranks of a world run, in order.

    Args:
        meetings: of the program, see :class:`World`.
    """
    kinds, _, _ = steps.columns
    sends = np.flatnonzero(kinds == SEND)
    if len(sends) <= LEAST:
        return []
    columns = _columns(steps.program)
    # a block begins after the event of the step before its send
    begins = np.where(sends > 0, steps.at[sends - 1] + 1, 0)
    digests = _digests(columns, begins)
    found: list[Periods] = []
    free = np.ones(len(digests), dtype=bool)
    for length in range(1, MOST_SENDS + 1):
        alike = digests[length:] == digests[:-length]
        alike &= free[length:] & free[:-length]
        for first, end in _runs(alike):
            count = (end - first + length) // length
            last = first + count * length
            if count < LEAST:
                continue
            one = Periods(
                int(sends[first]),
                int(sends[first + length] - sends[first]),
                int(begins[first]),
                int(begins[first + length] - begins[first]),
                count,
            )
            ends = sends[last] == one.end and begins[last] == one.end_event
            if ends and _hold(one, steps, columns, meetings):
                found.append(one)
                free[first:last] = False
    return sorted(found, key=lambda one: one.first)


def _columns(program: Program) -> list[np.ndarray]:
    """What makes an event, each with one entry or row an event; the first ones tell most apart."""
    back = np.where(program.kind == WAIT, np.arange(len(program)) - program.partner, program.partner)
    return [
        *(back, program.nbytes, program.flops, program.name, program.kind, program.stream),
        *(program.whose, program.category, program.precision, program.shape, program.strided, program.host),
    ]


def _digests(columns: list[np.ndarray], begins: np.ndarray) -> np.ndarray:
    """A number of each block but the last, which ends nowhere. Blocks that are the same have the same."""
    first, last = begins[0], begins[-1]
    mixed = np.zeros(last - first, dtype=np.uint64)
    for column in columns[:6]:
        values = column[first:last]
        whole = values.view(np.uint64) if values.itemsize == 8 else values.astype(np.uint64)
        mixed = (mixed ^ whole) * _MIX
        mixed ^= mixed >> np.uint64(29)
    lengths = np.diff(begins)
    places = np.arange(last - first) - np.repeat(begins[:-1] - first, lengths)
    return np.add.reduceat(mixed * (2 * places + 1).astype(np.uint64), begins[:-1] - first)


def _runs(which: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and end of each run of True."""
    edges = np.flatnonzero(np.diff(which, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _hold(
    one: Periods,
    steps: Steps,
    columns: list[np.ndarray],
    meetings: dict[tuple[int, int], list[Meeting]],
) -> bool:
    """Whether the candidate is what :class:`Periods` says."""
    for column in columns:
        within = column[one.event : one.end_event]
        if not np.array_equal(within[one.events :], within[: -one.events]):
            return False
    at_once = steps.at_once[one.first : one.end]
    if at_once[one.steps :] != at_once[: -one.steps]:
        return False
    kinds, _, partners = steps.columns
    for step in range(one.first, one.first + one.steps):
        if kinds[step] == COLLECTIVE:
            return False
        if kinds[step] in (SEND, RECV):
            # as many of each in a period: if the first and the last meet alike, all between do
            last = step + one.end - one.steps - one.first
            for meeting in meetings[int(kinds[step]), int(partners[step])]:
                half = meeting.halves[step]
                if not one.first <= half < one.first + one.steps:
                    return False
                if meeting.halves[last] - last != half - step:
                    return False
    return True
