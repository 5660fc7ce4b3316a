"""A trace cut into the turns of a step, and put together in the order of another step's turns.

A turn is the forward or backward of one micro-batch in a stage, and turns of the same kind do the same work.
So the trace of a step is put together from copies of the parts of another step. If a part refers to the turn
of some micro-batch, its copy refers to the turn with the same relation to the copy.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np

from spbench.bench.measure.engines.listed import (
    Listed,
    NotAlike,
    listed_log,
    listed_program,
    log_in_order,
    program_in_order,
)
from spbench.bench.measure.engines.rank_turns import RankTurns
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.simulator.program import Kind, Program
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter

#: the phases of turns; all other phases come after the last turn of a step
OF_TURNS = ("forward", "backward")

#: (step, turn) of a part; the number after the last turn is the end of the step, and step -1 is set-up
_Key = tuple[int, int]
_SET_UP = (-1, 0)


class TurnParts:
    """A list cut into set-up, the turns of each step, and the ends of steps.

    Attributes:
        keys: the key of each part, in order.
        starts: the first entry of each part, then the length of the list.
        first: for each part the number of targets before it, then the number of all targets.

    Raises:
        NotAlike: the phases of the list are not the phases of the turns.
    """

    def __init__(self, listed: Listed, turns: RankTurns, steps: int):
        self.listed, self.turns, self.steps, self.keys = listed, turns, steps, _keys(turns, steps)
        places = np.flatnonzero(listed.is_mark)
        names = listed.words_of(places)
        self.starts, at = [0], 0
        for _, turn in self.keys[1:]:
            end = at
            if turn < len(turns):
                end += len(turns.phases(turn))
                if names[at:end] != turns.phases(turn):
                    raise NotAlike(f"turn {turn} is {', '.join(map(str, names[at:end]))}")
            else:
                while end < len(names) and names[end] not in OF_TURNS:
                    end += 1
            self.starts.append(int(places[at]) if at < end else len(listed))
            at = end
        if at < len(names):
            raise NotAlike(f"{names[at]} comes after the last step")
        self.starts.append(len(listed))
        self._targets = np.flatnonzero(listed.targets)
        self._numbers = np.concatenate(([0], np.cumsum(listed.targets)))
        self.first = self._numbers[self.starts]

    def entries(self, part: int) -> np.ndarray:
        """The places of a part's entries in the list."""
        return np.arange(self.starts[part], self.starts[part + 1])

    def in_turns(self, turns: RankTurns) -> tuple[np.ndarray, np.ndarray]:
        """The list of a stage with the turns ``turns``, as copies of this list's entries.

        Returns:
            (for each new entry, the entry of this list of which it is a copy; the new entry that it refers
            to, or -1)

        Raises:
            NotAlike: the new entry to which some entry refers cannot be determined, or the stage has more
                turns than this list, whose steady turns differ.
        """
        keys, part_of = _keys(turns, self.steps), {key: part for part, key in enumerate(self.keys)}
        for pair in self.turns.steady if len(turns) > len(self.turns) else ():
            one, other = (self.entries(part_of[self.steps - 1, place]) for place in pair)
            if not np.array_equal(self.listed.tokens[one], self.listed.tokens[other]):
                raise NotAlike(f"turns {pair} of a steady state differ")
        alike = _likes(turns, self.turns)
        likes = [part_of[step, alike[turn] if step >= 0 else turn] for step, turn in keys]
        place_of = {key: place for place, key in enumerate(keys)}
        begins = np.cumsum([0, *(self.first[part + 1] - self.first[part] for part in likes)])
        like = np.concatenate([self.entries(part) for part in likes])
        targets, pieces = np.flatnonzero(self.listed.targets[like]), []
        of_parts = {part: self._references(part) for part in {*likes}}
        for (step, turn), part in zip(keys, likes, strict=True):
            refers, of_owners = of_parts[part]
            pieces.append(refers.copy())
            for owner, own, within in of_owners:
                key = self._referred(owner, self.keys[part], (step, turn), turns)
                if key not in place_of:
                    raise NotAlike(f"there is no turn {key}")
                there, copied = place_of[key], likes[place_of[key]]
                pieces[-1][own] = targets[begins[there] + self._within(owner, copied, within)]
        return like, np.concatenate(pieces)

    def _references(self, part: int) -> tuple[np.ndarray, list[tuple[int, np.ndarray, np.ndarray]]]:
        """([entries]: the entry to which each entry of a part refers, or -1; for each part that is referred
        to: (that part, the referring entries, the numbers of their targets in that part))."""
        refers = self.listed.references[self.entries(part)]
        entries = np.flatnonzero(refers >= 0)
        numbers = self._numbers[refers[entries]]
        owners = np.searchsorted(self.first[1:], numbers, side="right")
        apart = ((owner, owners == owner) for owner in np.unique(owners).tolist())
        return refers, [(owner, entries[own], numbers[own] - self.first[owner]) for owner, own in apart]

    def _within(self, owner: int, copied: int, within: np.ndarray) -> np.ndarray:
        """The numbers of the targets in the part ``copied`` that correspond to the targets ``within`` of the
        part ``owner``: the n-th of a kind to the n-th of the same kind.

        Raises:
            NotAlike: the two parts have different numbers of targets of a kind.
        """
        mine, theirs = self._kinds(owner), self._kinds(copied)
        if copied == owner or np.array_equal(mine, theirs):
            return within
        places = []
        for place in within.tolist():
            here, there = (np.flatnonzero(kinds == mine[place]) for kinds in (mine, theirs))
            if len(here) != len(there):
                raise NotAlike(f"parts {self.keys[copied]} and {self.keys[owner]} differ")
            places.append(there[np.searchsorted(here, place)])
        return np.array(places, dtype=np.int64)

    def _kinds(self, part: int) -> np.ndarray:
        """The kinds (tokens) of the entries in a part to which others may refer."""
        return self.listed.tokens[self._targets[self.first[part] : self.first[part + 1]]]

    def _referred(self, owner: int, of_like: _Key, of: _Key, turns: RankTurns) -> _Key:
        """In a program of other ``turns``, the key of the part to whose entries the part ``of`` refers.
        ``of`` copies this program's part ``of_like``, which refers to entries of the part ``owner``."""
        (step, turn), (_, at), (there, to) = self.keys[owner], of_like, of
        if step < 0:
            return self.keys[owner]
        if step < there:  # a later step counts from the end of the earlier step
            at, to = len(self.turns), len(turns)
        return step, self.turns.moved(at, turn, turns, to)


def _keys(turns: RankTurns, steps: int) -> list[_Key]:
    return [_SET_UP, *((step, turn) for step in range(steps) for turn in range(len(turns) + 1))]


@lru_cache(maxsize=16)
def _likes(turns: RankTurns, held: RankTurns) -> list[int]:
    """For each turn of ``turns``, and the end, the like turn of ``held``; all lists of a trace share this."""
    return [turns.like(turn, held) for turn in range(len(turns) + 1)]


def put_together(trace: Trace, held: RankTurns, turns: RankTurns) -> Trace:
    """The trace of a stage with the turns ``turns``, from the trace of a stage with the turns ``held``.

    Raises:
        NotAlike: the trace does not determine the other stage's trace.
    """
    program, communication = None, trace.communication
    if trace.program is not None:
        program, source = program_of(trace.program, held, turns)
        communication = _in_order(communication, trace.program, source)
    memory, on_host = (_memory(log, held, turns) for log in (trace.memory, trace.host_memory))
    return replace(trace, memory=memory, host_memory=on_host, program=program, communication=communication)


def program_of(program: Program, held: RankTurns, turns: RankTurns) -> tuple[Program, np.ndarray]:
    """(the program of a stage with the turns ``turns``, :attr:`Order.source`), from a program with ``held``.

    Raises:
        NotAlike: the program does not determine the other stage's program.
    """
    parts = TurnParts(listed_program(program), held, 1)
    order = parts.listed.order(*parts.in_turns(turns))
    return program_in_order(program, order), order.source


def _in_order(meter: CommunicationMeter, program: Program, source: np.ndarray) -> CommunicationMeter:
    """The meter with the counts of communication of a program that is put in another order.

    Args:
        source: :attr:`Order.source` of the new program.

    Raises:
        NotAlike: the meter has counts but not the order of calls.
    """
    communicates = np.isin(program.kind, (Kind.COLLECTIVE, Kind.SEND, Kind.RECV))
    number = np.cumsum(communicates) - 1
    before = len(meter.calls) - int(communicates.sum())
    if before < 0:
        raise NotAlike("it is not known which calls communicate")
    numbers = [*range(before), *(before + number[source[communicates[source]]]).tolist()]
    calls = [meter.calls[call] for call in numbers]
    other = meter.with_counts(Counter(calls))
    other.calls += calls
    return other


def _memory(log: MemoryLog, held: RankTurns, turns: RankTurns) -> MemoryLog:
    sizes = np.asarray(log.sizes, dtype=np.int64)
    listed = listed_log(log, sizes[np.abs(np.asarray(log.events, dtype=np.int64)) - 1], log.ends)
    parts = TurnParts(listed, held, len(log.step_ends))
    like, references = parts.in_turns(turns)
    like, references = _with_all_deaths(listed, like, references)
    return log_in_order(log, listed.order(like, references))


def _with_all_deaths(
    listed: Listed, like: np.ndarray, references: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The list (its entries' sources and references), with the deaths at the end of a step of storages kept
    for each micro-batch, if the list has more micro-batches than the list from which it is put together.

    Raises:
        NotAlike: a storage dies twice, or dies although its like does not.
    """
    dies, has_death = listed.references >= 0, np.zeros(len(listed), dtype=bool)
    has_death[listed.references[dies]] = True
    dies_here = references >= 0
    targets, deaths = np.unique(references[dies_here], return_counts=True)
    left = has_death[like]
    if (deaths > 1).any() or not left[targets].all():
        raise NotAlike("something dies twice, or dies and its like does not")
    left[targets] = False
    if not left.any():
        return like, references
    # each death goes where its like dies, after the deaths of storages that were born earlier
    death_of = np.full(len(listed), -1)
    death_of[listed.references[dies]] = np.flatnonzero(dies)
    born = np.flatnonzero(left)
    where = np.empty_like(born)
    for place, death in enumerate(death_of[like[born]].tolist()):
        copies = np.flatnonzero(like == death)
        if len(copies) != 1:
            raise NotAlike("something dies within a step, and what is like it does not")
        at = int(copies[0])
        while references[at - 1] > born[place]:
            at -= 1
        while 0 <= references[at] < born[place]:
            at += 1
        where[place] = at
    where.sort()
    moved = np.arange(len(like)) + np.searchsorted(where, np.arange(len(like)), side="right")
    references = np.insert(np.where(references < 0, -1, moved[references]), where, moved[born])
    return np.insert(like, where, death_of[like[born]]), references
