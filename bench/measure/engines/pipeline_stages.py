"""Stages of a pipeline that differ only in how many micro-batches they hold: a short step of one is traced,
and theirs are put together from its parts (:mod:`measure.engines.turn_parts`).

Time is counted in turns: turn t runs the forward of micro-batch t and the backward of micro-batch t - ahead,
where there are these. So a step has a warm-up of forwards, a steady state of both, and an end of backwards.
Stages whose modules have the same form do the same in a turn of the same kind, whatever they hold. Those that
hold several runs of layers have turns of their own (:mod:`measure.engines.interleaved_turns`).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from spbench.impls import Ahead, backend_class, forwards_ahead

#: turns of one kind that are told apart before they repeat; what a turn frees or waits for is of one of as
#: many turns before it, or of its micro-batch's forward
_APART = 2
#: the most micro-batches that a short step holds
_FEWEST = 2 * _APART
#: its micro-batches: of its warm-up, of a steady state that repeats, and a last one
SHORT = 3 * _FEWEST + 1

#: traces of short steps, by the form of a stage's modules and the turns of the step
ShortSteps = dict[Hashable, dict[AnyTurns, Trace]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """The turns of a step: of ``count`` micro-batches, ``ahead`` of which run forward before the first
    backward; ``begins``: whether a phase of its own comes before them."""

    count: int
    ahead: int
    begins: bool = False

    @property
    def run(self) -> Ahead:
        """What a step is asked to run, see :func:`record_step`."""
        return Ahead(self.count, self.ahead)

    def shorter(self) -> Iterator[Turns]:
        """The step from which this one is put together, if there is one that is shorter."""
        # stages that hold one or none have no first ones that differ from others
        ahead = self.ahead if self.ahead < _APART else _FEWEST
        if self._alternates:
            count = SHORT
        elif self.both > self.ahead:
            count = self.count - 2 * (self.ahead - ahead)
        else:
            both = min(self.both, _FEWEST)
            ahead = both + min(self._warm_tail, _FEWEST - bool(both))
            count = both + ahead
        if count < self.count:
            yield replace(self, count=count, ahead=ahead)

    def __len__(self) -> int:
        return self.count + self.ahead

    def phases(self, turn: int) -> list[str]:
        """The phases of a turn, in order."""
        return ["forward"] * (self.begins and turn == 0) + [
            *OF_TURNS[turn >= self.count : 1 + (turn >= self.ahead)]
        ]

    @property
    def both(self) -> int:
        """How many turns have a forward and a backward."""
        return self.count - self.ahead

    @property
    def _warm_tail(self) -> int:
        """How many turns with a backward alone have micro-batches of the warm-up."""
        return max(0, self.ahead - self.both)

    @property
    def _alternates(self) -> bool:
        """Whether forwards and backwards alternate until turns repeat."""
        return self.count > 2 * self.ahead + _APART

    def like(self, turn: int, other: Turns) -> int:
        """The turn of a short step, ``other``, in which the same is done as in this stage's ``turn``. Of a
        step as far ahead with one micro-batch more, the second turn of both phases is like none."""
        back = turn - self.ahead
        if (self.count + 1, self.ahead) == (other.count, other.ahead):
            return turn + (back > 0)
        if turn >= len(self) - 1:
            return turn - len(self) + len(other)
        if turn < self.ahead:
            return min(turn, _APART)
        if turn == self.count - 1:
            return other.count - 1
        if turn < self.count and back < self.ahead:  # of a micro-batch of the warm-up
            return other.ahead + min(back, _APART)
        if turn < self.count:
            # the latest of its kind: in the turns before it things of the first ones may still die
            return 2 * other.ahead + min(back - self.ahead, other.both - 2 - other.ahead)
        return other.count + self._like_in_tail(turn - self.count, other)

    def _like_in_tail(self, turn: int, other: Turns) -> int:
        """As :meth:`like`, for turns after the last forward; both turns count from there."""
        if turn < self._warm_tail:
            return min(turn, _APART if other.both else other._warm_tail - 2)
        return other._warm_tail + min(turn - self._warm_tail, _APART)

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
        if turn >= len(self) - 1:  # the end of the step refers to the first and the last turns of each kind
            for mine, theirs in ((len(self), len(other)), (self.count, other.count)):
                if abs(of - mine) <= _APART:
                    return of - mine + theirs
            if of <= 1 or of - self.ahead in (0, 1):
                return of if of <= 1 else of - self.ahead + other.ahead
            if not self.ahead:  # the last stage keeps the loss of each micro-batch
                return of if 2 * of < self.count else of - self.count + other.count
        raise NotAlike(f"turn {turn} refers to turn {of}")


def without_one(cell: Cell, classes: Sequence[RankClass], traces: Sequence[Trace]) -> list[Trace]:
    """The traces of rank classes with programs of one micro-batch less, which is neither the first nor the
    last in any stretch of a step. Memory stays as it is in the cell.

    Raises:
        NotAlike: the traces do not show it: the schedule is interleaved, or there are few micro-batches.
    """
    count, schedule, fewer = cell.training.micro_batches, cell.training.schedule, []
    if schedule != "1f1b" or count < cell.sizes.pp + 2:
        raise NotAlike("turns of several runs of layers, or too few of them")
    for each, traced in zip(classes, traces, strict=True):
        held = _turns(cell, each)
        assert isinstance(held, Turns)
        assert traced.program is not None
        parts = TurnParts(listed_program(traced.program), held, 1)
        like, references = parts.in_turns(replace(held, count=count - 1))
        program = program_in_order(traced.program, parts.listed.order(like, references))
        fewer.append(replace(traced, program=program))
    return fewer


def stage_traces(
    cell: Cell,
    classes: Sequence[RankClass],
    *,
    events: bool,
    micro_batches: int | None = None,
    short: ShortSteps | None = None,
) -> list[Trace]:
    """The trace of the first rank of each of the rank classes of a cell that was planned; arguments as of
    :func:`trace`.

    Args:
        micro_batches: of a step with fewer than the cell has. Inputs are those of all of them.
        short: what was traced already, to which further steps are added.

    Raises:
        NotAlike: the traces do not say what fewer micro-batches do.
    """
    alike: dict[tuple[Hashable, AnyTurns, AnyTurns], list[int]] = {}
    for each in classes:
        whole, turns = _turns(cell, each), _turns(cell, each, micro_batches)
        alike.setdefault((_form(cell, each), whole, turns), []).append(each.first)
    short, traces = {} if short is None else short, dict[int, Trace]()
    for (form, whole, turns), ranks in alike.items():
        traced = short.setdefault(form, {})
        made = _from_short_step(turns, whole, traced, cell, ranks[0])
        if made is None:
            if turns != whole:
                raise NotAlike(f"ranks {ranks} are traced whole")
            _log.info("ranks %s of %s are traced whole", ranks, cell.key)
            made = trace(cell, ranks[0], events=events, checked=True)
        made = made if events else replace(made, program=None)
        traces |= {rank: replace(made, rank=rank) for rank in ranks}
    return [traces[each.first] for each in classes]


def trace_of_class(cell: Cell, ranks: RankClass, *, events: bool = False, effort: Effort = "proved") -> Trace:
    """The trace of the first rank of a class alone; arguments as of :func:`trace`. Stages of a pipeline are
    not guessed."""
    if cell.sizes.pp > 1 and not cell.meters and not takes_plain_path():
        check_sizes(cell)
        return stage_traces(cell, [ranks], events=events)[0]
    return trace(cell, ranks.first, events=events, effort=effort)


def _turns(cell: Cell, each: RankClass, micro_batches: int | None = None) -> AnyTurns:
    training, backend = cell.training, backend_class(cell.training.backend)
    count = micro_batches or training.micro_batches
    if (turns := turns_of(cell, each.stage)) is not None:
        turns = replace(turns, micro_batches=count)
        return InterleavedTurns(turns, backend.zeroes_in_step, "parameters" in (backend.shares_out or ()))
    return Turns(count, forwards_ahead(training.schedule, each.stage, count), backend.zeroes_in_step)


def _from_short_step(
    turns: AnyTurns, whole: AnyTurns, traced: dict[AnyTurns, Trace], cell: Cell, rank: int
) -> Trace | None:
    """The trace of a rank with these turns, and events, from a shorter step than its whole one; None: no
    shorter step tells it.

    Args:
        traced: short steps, to which further ones are added.
    """
    for short in whole.shorter():
        if len(short) > len(whole):
            continue
        if short not in traced:
            # its program says which calls communicate in which turn
            traced[short] = trace(cell, rank, events=True, checked=True, turns=short.run)
        try:
            return put_together(traced[short], short, turns)
        except NotAlike as error:
            _log.info("rank %s of %s is not as %s: %s", rank, cell.key, short.run, error)
    return None


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
