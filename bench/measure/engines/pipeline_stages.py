"""Stages of a pipeline that differ only in how many micro-batches they hold: few are traced, the others are
put together from their parts.

Time is counted in turns: turn t runs the forward of micro-batch t and the backward of micro-batch t - ahead,
where there are these. So a step has a warm-up of forwards, a steady state of both, and an end of backwards.
Stages whose modules have the same form do the same in a turn of the same kind, whatever they hold.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.cell_schedule import turns_of
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.interleaved_turns import InterleavedTurns
from spbench.bench.measure.engines.listed import NotAlike, listed_program, program_in_order
from spbench.bench.measure.engines.plan import RankClass, check_sizes, stage_module
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import takes_plain_path, trace
from spbench.bench.measure.engines.turn_parts import OF_TURNS, AnyTurns, TurnParts, put_together
from spbench.impls.registries import backend_class
from spbench.impls.training.pipeline import forwards_ahead

#: turns of one kind that are told apart before they repeat; what a turn frees or waits for is of one of as
#: many turns before it, or of its micro-batch's forward
_APART = 2
#: the fewest micro-batches held by a stage whose parts others are put together from
_FEWEST = 2 * _APART
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """The turns of a step: of ``count`` micro-batches, ``ahead`` of which run forward before the first
    backward; ``begins``: whether a phase of its own comes before them."""

    count: int
    ahead: int
    begins: bool = False

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
        parts = TurnParts(listed_program(traced.program), held, 1)
        like, references = parts.in_turns(replace(held, count=count - 1))
        program = program_in_order(traced.program, parts.listed.order(like, references))
        fewer.append(replace(traced, program=program))
    return fewer


def stage_traces(cell: Cell, classes: Sequence[RankClass], *, events: bool) -> list[Trace]:
    """The trace of the first rank of each of the rank classes of a cell that was planned; arguments as of
    :func:`trace`."""
    alike: dict[Hashable, dict[Any, list[int]]] = {}
    for each in classes:
        alike.setdefault(_form(cell, each), {}).setdefault(_turns(cell, each), []).append(each.first)
    interleaved = cell.training.schedule == "interleaved"
    traces = {
        rank: replace(made, rank=rank)
        for by_turns in alike.values()
        for ranks, made in (_by_short_step if interleaved else _by_ahead)(by_turns, cell, events)
        for rank in ranks
    }
    return [traces[each.first] for each in classes]


def trace_of_class(cell: Cell, ranks: RankClass, *, events: bool = False, effort: Effort = "proved") -> Trace:
    """The trace of the first rank of a class alone; arguments as of :func:`trace`."""
    if cell.training.schedule == "interleaved" and not cell.meters and not takes_plain_path():
        check_sizes(cell)
        return stage_traces(cell, [ranks], events=events)[0]
    return trace(cell, ranks.first, events=events, effort=effort)


def _turns(cell: Cell, each: RankClass) -> AnyTurns:
    training, begins = cell.training, backend_class(cell.training.backend).zeroes_in_step
    if (turns := turns_of(cell, each.stage)) is not None:
        return InterleavedTurns(turns, begins)
    count = training.micro_batches
    return Turns(count, forwards_ahead(training.schedule, each.stage, count), begins)


def _by_short_step(
    ranks: Mapping[InterleavedTurns, Sequence[int]], cell: Cell, events: bool
) -> Iterator[tuple[Sequence[int], Trace]]:
    """Ranks of an interleaved pipeline whose stages have the same form, and the trace of each of them. A rank
    whose trace cannot be told from one of a short step is traced.

    Args:
        ranks: by their turns.
    """
    by_short: dict[InterleavedTurns, Trace] = {}
    for turns, alike in ranks.items():
        short = turns.short()
        try:
            if short is None:
                raise NotAlike("there is no shorter step")
            if short not in by_short:
                # its program says which calls communicate in which turn
                by_short[short] = trace(cell, alike[0], events=True, checked=True, turns=short.of)
            together = put_together(by_short[short], short, turns)
            yield alike, together if events else replace(together, program=None)
        except NotAlike as error:
            _log.info("ranks %s of %s are traced whole: %s", alike, cell.key, error)
            yield alike, trace(cell, alike[0], events=events, checked=True)


def _by_ahead(
    ranks: Mapping[Turns, Sequence[int]], cell: Cell, events: bool
) -> Iterator[tuple[Sequence[int], Trace]]:
    """Ranks whose stages have the same form, and the trace of each of them.

    The two traced stages with the fewest micro-batches give the proof: the trace of the second, put together
    from that of the first, must equal the traced one in every field. If it does not, each stage is traced.

    Args:
        ranks: by their turns; ranks that run as many micro-batches ahead have one trace.
    """
    source: tuple[Trace, Turns] | None = None
    proved = False
    for turns in sorted(ranks, key=lambda turns: turns.ahead):
        made = None
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
