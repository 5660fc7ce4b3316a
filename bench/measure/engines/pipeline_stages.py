"""Stages of a pipeline that differ only in how many micro-batches they hold: few are traced, the others are
put together from their parts.

Time is counted in turns: turn t runs the forward of micro-batch t and the backward of micro-batch t - ahead,
where there are these. So a step has a warm-up of forwards, a steady state of both, and an end of backwards.
Stages whose modules have the same form do the same in a turn of the same kind, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.cell_schedule import turns_of
from spbench.bench.measure.engines.interleaved_turns import InterleavedTurns
from spbench.bench.measure.engines.listed import (
    Listed,
    NotAlike,
    listed_log,
    listed_program,
    log_in_order,
    program_in_order,
)
from spbench.bench.measure.engines.plan import RankClass, stage_module
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.impls.registries import backend_class
from spbench.impls.training.pipeline import forwards_ahead

#: turns of one kind that are told apart before they repeat; what a turn frees or waits for is of one of as
#: many turns before it, or of its micro-batch's forward
_APART = 2
#: the fewest micro-batches held by a stage whose parts others are put together from
_FEWEST = 2 * _APART
#: the phases of a turn; all others come after the last turn
OF_TURNS = ("forward", "backward")

#: (step, turn); the last turn of a step is followed by its end, and set-up is before the first
_Key = tuple[int, int]
_SET_UP = (-1, 0)


@dataclass(frozen=True)
class Turns:
    """The turns of a step: of ``count`` micro-batches, ``ahead`` of which run forward before the first
    backward; ``begins``: whether a phase of its own comes before them."""

    count: int
    ahead: int
    begins: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        """All stages that run ahead are put together from one."""
        return ()

    def __len__(self) -> int:
        return self.count + self.ahead

    def phases(self, turn: int) -> list[str]:
        """The phases of a turn, in order."""
        return ["forward"] * (self.begins and turn == 0) + [
            *OF_TURNS[turn >= self.count : 1 + (turn >= self.ahead)]
        ]

    @property
    def complete(self) -> bool:
        """Whether turns of every kind occur."""
        return self.ahead >= _FEWEST and self.count > 2 * self.ahead + _APART

    def like(self, turn: int, other: Turns) -> int:
        """The turn of another stage that does what this stage does in a turn; both :attr:`complete`, or the
        other as far ahead and of one micro-batch more: then its second turn of both phases has no like."""
        back = turn - self.ahead
        if (self.count + 1, self.ahead) == (other.count, other.ahead):
            return turn + (back > 0)
        if turn < self.ahead:
            return min(turn, _APART)
        if back < self.ahead:  # of a micro-batch of the warm-up
            return other.ahead + min(back, _APART)
        if turn < self.count - 1:
            return 2 * other.ahead + min(back - self.ahead, _APART)
        if turn in (self.count - 1, len(self) - 1, len(self)):
            return turn - self.count + other.count if turn < self.count else turn - len(self) + len(other)
        return other.count + min(turn - self.count, _APART)

    def moved(self, turn: int, of: int, other: Turns, to: int) -> int:
        """The turn that turn ``to`` of another stage refers to, where its like, ``turn`` of this stage,
        refers to turn ``of``.

        Raises:
            NotAlike: it cannot be told which.
        """
        by = turn - of
        if turn < len(self):
            if by <= _APART:
                return to - by
            if by - self.ahead in (0, 1):  # what the micro-batch's forward made, or received before it
                return to - by + self.ahead - other.ahead
        else:  # the end of the step refers to the first and the last turns of each kind
            for mine, theirs in ((len(self), len(other)), (self.count, other.count)):
                if abs(of - mine) <= _APART:
                    return of - mine + theirs
            if of <= 1 or of - self.ahead in (0, 1):
                return of if of <= 1 else of - self.ahead + other.ahead
        raise NotAlike(f"turn {turn} refers to turn {of}")


class AnyTurns(Protocol):
    """:class:`Turns` of one stage a rank, or :class:`InterleavedTurns` of several."""

    @property
    def ahead(self) -> int: ...

    @property
    def order(self) -> tuple[int, ...]: ...

    @property
    def complete(self) -> bool: ...

    def __len__(self) -> int: ...

    def phases(self, turn: int) -> list[str]: ...

    def like(self, turn: int, other: Any) -> int: ...

    def moved(self, turn: int, of: int, other: Any, to: int) -> int: ...


class _Parts:
    """A list cut into set-up, the turns of each step, and the ends of steps.

    Attributes:
        keys: of the parts, in order.
        starts: the first entry of each part, and the length of the list.
        first: of each part the number of targets before it, and the number of all.

    Raises:
        NotAlike: the phases are not those of turns.
    """

    def __init__(self, listed: Listed, turns: AnyTurns, steps: int):
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
        """The entries of a part."""
        return np.arange(self.starts[part], self.starts[part + 1])

    def in_turns(self, turns: AnyTurns) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The list of a stage with other turns.

        Returns:
            (of each entry, the one of this list that it is a copy of; what it refers to, -1: nothing; for
            each part of the other turns, the part that it is a copy of)

        Raises:
            NotAlike: it cannot be told what one refers to.
        """
        keys, part_of = _keys(turns, self.steps), {key: part for part, key in enumerate(self.keys)}
        likes = [part_of[step, turns.like(turn, self.turns) if step >= 0 else turn] for step, turn in keys]
        place_of = {key: place for place, key in enumerate(keys)}
        begins = np.cumsum([0, *(self.first[part + 1] - self.first[part] for part in likes)])
        like = np.concatenate([self.entries(part) for part in likes])
        targets, pieces = np.flatnonzero(self.listed.targets[like]), []
        for (step, turn), part in zip(keys, likes, strict=True):
            refers = self.listed.references[self.entries(part)]
            numbers = self._numbers[refers[refers >= 0]]
            owners = np.searchsorted(self.first[1:], numbers, side="right")
            for owner in np.unique(owners).tolist():
                key = self._referred(owner, self.keys[part], (step, turn), turns)
                if key not in place_of:
                    raise NotAlike(f"there is no turn {key}")
                copied = likes[place_of[key]]
                if copied != owner and not np.array_equal(self._kinds(copied), self._kinds(owner)):
                    raise NotAlike(f"parts {self.keys[copied]} and {self.keys[owner]} differ")
                numbers[owners == owner] += begins[place_of[key]] - self.first[owner]
            pieces.append(refers.copy())
            pieces[-1][refers >= 0] = targets[numbers]
        return like, np.concatenate(pieces), likes

    def _kinds(self, part: int) -> np.ndarray:
        """What may be referred to in a part."""
        return self.listed.tokens[self._targets[self.first[part] : self.first[part + 1]]]

    def _referred(self, owner: int, of_like: _Key, of: _Key, turns: AnyTurns) -> _Key:
        """The part of other turns that the one ``of`` refers to, where its like refers to ``owner``."""
        (step, turn), (_, at), (there, to) = self.keys[owner], of_like, of
        if step < 0:
            return self.keys[owner]
        if step < there:  # as seen from the end of that step
            at, to = len(self.turns), len(turns)
        return step, self.turns.moved(at, turn, turns, to)


def _keys(turns: AnyTurns, steps: int) -> list[_Key]:
    return [_SET_UP, *((step, turn) for step in range(steps) for turn in range(len(turns) + 1))]


def put_together(trace: Trace, held: AnyTurns, turns: AnyTurns) -> Trace:
    """The trace of a stage with other turns than the traced one, which has ``held``; both complete.

    Raises:
        NotAlike: it cannot be told from that trace.
    """
    program = None
    if trace.program is not None:
        parts = _Parts(listed_program(trace.program), held, 1)
        like, references, _ = parts.in_turns(turns)
        program = program_in_order(trace.program, parts.listed.order(like, references))
    memory, on_host = (_memory(log, held, turns) for log in (trace.memory, trace.host_memory))
    return replace(trace, memory=memory, host_memory=on_host, program=program)


def without_one(cell: Cell, classes: Sequence[RankClass], traces: Sequence[Trace]) -> list[Trace]:
    """The traces of rank classes with programs of one micro-batch less than the cell has: one that is neither
    the first nor the last in any of a step's stretches. Memory stays that of the cell.

    Raises:
        NotAlike: the traces do not say it, as of the interleaved schedule, or of hardly any micro-batches.
    """
    count, schedule, fewer = cell.training.micro_batches, cell.training.schedule, []
    if schedule != "1f1b" or count < cell.sizes.pp + 2:
        raise NotAlike("turns of several runs of layers, or too few of them")
    for each, traced in zip(classes, traces, strict=True):
        assert traced.program is not None
        held = _turns(cell, each)
        assert isinstance(held, Turns)
        parts = _Parts(listed_program(traced.program), held, 1)
        like, references, _ = parts.in_turns(replace(held, count=count - 1))
        program = program_in_order(traced.program, parts.listed.order(like, references))
        fewer.append(replace(traced, program=program))
    return fewer


def _memory(log: MemoryLog, held: AnyTurns, turns: AnyTurns) -> MemoryLog:
    sizes = np.asarray(log.sizes, dtype=np.int64)
    listed = listed_log(log, sizes[np.abs(np.asarray(log.events, dtype=np.int64)) - 1], ())
    parts = _Parts(listed, held, len(log.step_ends))
    like, references, likes = parts.in_turns(turns)
    together = log_in_order(log, listed.order(like, references))
    # of each part its first event, in both logs; a step ends as long after its last part begins
    begins = np.concatenate(([0], np.cumsum(~listed.is_mark)))[parts.starts]
    begins_there = np.cumsum([0, *(begins[part + 1] - begins[part] for part in likes)])
    last = [place for place, (_, turn) in enumerate(_keys(turns, parts.steps)) if turn == len(turns)]
    together.ends = [
        int(begins_there[place] + end - begins[likes[place]])
        for place, end in zip(last, log.ends, strict=False)
    ]
    return together


def stage_traces(cell: Cell, classes: Sequence[RankClass], *, events: bool) -> list[Trace]:
    """The trace of the first rank of each of the rank classes of a cell that was planned; arguments as of
    :func:`trace`."""
    alike: dict[Hashable, dict[AnyTurns, list[int]]] = {}
    for each in classes:
        alike.setdefault(_form(cell, each), {}).setdefault(_turns(cell, each), []).append(each.first)
    traces = {
        rank: replace(made, rank=rank)
        for by_turns in alike.values()
        for ranks, made in _by_ahead(by_turns, cell, events)
        for rank in ranks
    }
    return [traces[each.first] for each in classes]


def _turns(cell: Cell, each: RankClass) -> AnyTurns:
    turns, training = turns_of(cell, each.stage), cell.training
    if turns is not None:
        return InterleavedTurns(turns)
    count = training.micro_batches
    begins = backend_class(training.backend).zeroes_in_step
    return Turns(count, forwards_ahead(training.schedule, each.stage, count), begins)


def _by_ahead(
    ranks: Mapping[AnyTurns, Sequence[int]], cell: Cell, events: bool
) -> Iterator[tuple[Sequence[int], Trace]]:
    """Ranks whose stages have the same form, and the trace of each of them.

    The two traced stages with the fewest micro-batches give the proof: the trace of the second, put together
    from that of the first, must equal the traced one in every field. If it does not, each stage is traced.
    Those of another :attr:`InterleavedTurns.order` are put together from one of their own.

    Args:
        ranks: by their turns; ranks that run as many micro-batches ahead have one trace.
    """
    source: tuple[Trace, AnyTurns] | None = None
    proved = False
    for turns in sorted(ranks, key=lambda turns: turns.ahead):
        made = None
        if source is not None and source[1].order != turns.order:
            source = None
        if source is not None and turns.complete:
            try:
                made = put_together(*source, turns)
            except NotAlike:
                source, proved = None, False
        if made is None or not proved:
            traced = trace(cell, ranks[turns][0], events=events, checked=True)
            if made is not None:
                proved = made.same(traced)
            if turns.complete and (source is None or not proved):
                source = traced, turns
            made = traced
        yield ranks[turns], made


def _form(cell: Cell, each: RankClass) -> Hashable:
    """What the trace of a rank depends on, beside how many micro-batches its stage holds: whether the stage
    is the first or the last, the rank's place in its strategy, and its modules with their settings."""
    modules = tuple(_settings(module) for module in stage_module(cell, each).modules())
    return each.stage.first, each.stage.last, tuple(each.coordinates.items()), modules


def _settings(module: nn.Module) -> Hashable:
    own = vars(module).items()
    plain = tuple((name, value) for name, value in own if isinstance(value, (bool, int, float, str)))
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in module.named_parameters(recurse=False))
    return type(module), plain, shapes
