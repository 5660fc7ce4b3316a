"""Stages of a pipeline that differ only in how many micro-batches they hold: a short step of one is traced,
and theirs are put together from its parts (:mod:`measure.engines.turn_parts`).

Stages whose modules have the same form do the same in an action of the same kind
(:mod:`measure.engines.rank_turns`), however many micro-batches they hold.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.cell_schedule import turns_of
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import RankClass, check_sizes, stage_module
from spbench.bench.measure.engines.rank_turns import OneRun, RankTurns
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import takes_plain_path, trace
from spbench.bench.measure.engines.turn_parts import program_of, put_together
from spbench.impls import backend_class, forwards_ahead

#: traces of short steps, by the form of a stage's modules and the turns of the step
ShortSteps = dict[Hashable, dict[RankTurns, Trace]]

_log = logging.getLogger(__name__)


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
        assert traced.program is not None
        program, _ = program_of(traced.program, _turns(cell, each), _turns(cell, each, count - 1))
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
    alike: dict[tuple[Hashable, RankTurns, RankTurns], list[int]] = {}
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


def _turns(cell: Cell, each: RankClass, micro_batches: int | None = None) -> RankTurns:
    training, backend = cell.training, backend_class(cell.training.backend)
    count = micro_batches or training.micro_batches
    turns = turns_of(cell, each.stage)
    if turns is None:
        turns = OneRun.of(count, forwards_ahead(training.schedule, each.stage, count))
    gathers = "parameters" in (backend.shares_out or ())
    return RankTurns(replace(turns, micro_batches=count), backend.zeroes_in_step, gathers)


def _from_short_step(
    turns: RankTurns, whole: RankTurns, traced: dict[RankTurns, Trace], cell: Cell, rank: int
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
