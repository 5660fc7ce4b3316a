"""Periods of a step program: where it does the same again and again, as a ring does hop by hop.

They are found by the program alone, whatever its events cost. Candidates are runs of blocks, from one send to
the next, whose digests repeat; each is then compared in every column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spbench.bench.measure.simulator.program import COLLECTIVE, RECV, SEND, WAIT, Program
from spbench.bench.measure.simulator.steps import Meeting, Steps

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
