"""Single changes of a layout that a search looks at beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.tools.advise.candidates import ordered
from spbench.bench.tools.advise.layouts import other_folds, settings_of
from spbench.bench.tools.advise.question import Question
from spbench.impls.folding import FOLDED_AXES
from spbench.impls.models.model import model_preset

#: orders of the mesh that are tried for the best
_OTHER_ORDERS = (
    ("pp", "dp", "cp", "sp", "tp"),
    ("dp", "pp", "sp", "cp", "tp"),
    ("dp", "pp", "tp", "cp", "sp"),
)


def changes_beside(question: Question, cell: Cell) -> list[Cell]:
    """A cell with other settings of its strategy, ranks for its experts and orders of its mesh."""
    return _changed(question, cell, _beside(question, cell))


def cheaper_savings(question: Question, cell: Cell) -> list[Cell]:
    """A cell with settings that save less memory than its own and take less time, the cheapest first."""
    return _changed(question, cell, _cheaper(question, cell))


def _changed(question: Question, cell: Cell, changes: Iterator[dict[str, Any]]) -> list[Cell]:
    """The cell with each of these changes that can be."""
    cells: dict[str, Cell] = {}
    for settings in filter(question.keeps, changes):
        with suppress(UserError):
            other = changed(cell, settings)
            cells[other.key] = other
    return [*cells.values()]


def _beside(question: Question, cell: Cell) -> Iterator[dict[str, Any]]:
    for options in settings_of(question, cell.strategy)[1:]:
        yield {f"strategy_options.{name}": value for name, value in options.items()}
    sizes = cell.sizes.by_axis
    if getattr(question.model, "experts", 0) and not {*FOLDED_AXES} & {*question.fixed}:
        yield from other_folds(sizes)
    for order in _OTHER_ORDERS:
        if (mesh := ordered(sizes, order)) != cell.mesh:
            yield {"mesh": mesh}


def _cheaper(question: Question, cell: Cell) -> Iterator[dict[str, Any]]:
    model = model_preset(*question.cell.model_arguments)
    savings = [each.options for each in model.savings(cell.sizes.pp * cell.training.virtual_stages)]
    own = [at for at, each in enumerate(savings) if each.items() <= cell.model_options.items()]
    for saving in savings[: own[-1]] if own else []:
        yield {f"model_options.{name}": value for name, value in saving.items()}
