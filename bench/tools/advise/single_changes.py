"""Single changes of a layout that a search looks at beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spbench.bench.cell import Cell
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


def changes_beside(question: Question, cell: Cell) -> Iterator[dict[str, Any]]:
    """Other settings of a cell's strategy, other ranks for its experts, and other orders of its mesh."""
    for options in settings_of(question, cell.strategy)[1:]:
        yield {f"strategy_options.{name}": value for name, value in options.items()}
    sizes = cell.sizes.by_axis
    if getattr(question.model, "experts", 0) and not {*FOLDED_AXES} & {*question.fixed}:
        yield from other_folds(sizes)
    for order in _OTHER_ORDERS:
        if (mesh := ordered(sizes, order)) != cell.mesh:
            yield {"mesh": mesh}


def cheaper_savings(question: Question, cell: Cell) -> Iterator[dict[str, Any]]:
    """Settings that save less memory than a cell's own and take less time, the cheapest first."""
    model = model_preset(*question.cell.model_arguments)
    savings = [each.options for each in model.savings(cell.sizes.pp * cell.training.virtual_stages)]
    own = [at for at, each in enumerate(savings) if each.items() <= cell.model_options.items()]
    for saving in savings[: own[-1]] if own else []:
        yield {f"model_options.{name}": value for name, value in saving.items()}
