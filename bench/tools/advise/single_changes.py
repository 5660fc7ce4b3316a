"""Single changes of a layout that a search looks at beside it, and that its answer has prices of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed, written
from spbench.bench.tools.advise.candidates import ordered
from spbench.bench.tools.advise.layouts import other_folds, settings_of, switch_of
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.switch_prices import other_kernels
from spbench.bench.tools.fit.subject import ATTENTION
from spbench.bench.tools.fit.suggestions import dotted
from spbench.impls.folding import FOLDED_AXES
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backend_class

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


def without_switches(question: Question, cell: Cell) -> dict[str, Cell]:
    """A cell without each of its memory switches, and what needs it, by what is set with it: those of its
    backend first, then of its model, recomputation after its checkpoints."""
    cells: dict[str, Cell] = {}
    for settings, other in (*_less_on_host(cell), *_less_of_model(question.cell.model_options, cell)):
        if not {*settings} & {*question.options}:
            with suppress(UserError):
                cells[written(settings)] = changed(other, {})
    return cells


def _less_on_host(cell: Cell) -> Iterator[tuple[dict[str, Any], Cell]]:
    given = dict(cell.training.backend_options)
    kept = cell.training.model_dump(exclude_defaults=True, exclude={*given})
    searched = sorted(backend_class(cell.training.backend).options_type.searched(), key=len, reverse=True)
    own, *fewer = [each for each in searched if each.items() <= given.items()] or [{}]
    for each in fewer[:1]:
        gone = {name: value for name, value in own.items() if name not in each}
        rest = {name: value for name, value in given.items() if name not in gone}
        training = TrainingOptions.model_validate({**kept, **rest})
        yield dotted("training", gone), cell.model_copy(update={"training": training})


def _less_of_model(asked: Mapping[str, Any], cell: Cell) -> Iterator[tuple[dict[str, Any], Cell]]:
    own = {name: value for name, value in cell.model_options.items() if asked.get(name) != value}
    of_switches: dict[str, dict[str, Any]] = {}
    for name in sorted(own, key=lambda name: not name.startswith("checkpoint")):
        of_switches.setdefault(switch_of(name), {})[name] = own[name]
    if "recompute" in of_switches:  # checkpoints are of what is computed again
        of_switches["recompute"] |= {name: own[name] for name in own if name.startswith("checkpoint")}
    for switch in of_switches.values():
        before = {name: asked[name] for name in switch if name in asked}
        rest = {name: value for name, value in cell.model_options.items() if name not in switch}
        yield dotted("model_options", switch), cell.model_copy(update={"model_options": {**rest, **before}})


def other_settings(question: Question, cell: Cell) -> dict[str, Cell]:
    """A cell with each other setting of its strategy, order of its mesh, and attention kernel that the card
    has rates of, by what is set."""
    own_kernel = model_preset(*cell.model_arguments).attention_kernel
    kernels = [{ATTENTION: name} for name in other_kernels(cell) if name != own_kernel]
    others = {written(each): changed(cell, each) for each in kernels}
    for each in changes_beside(question, cell):
        if each.sizes == cell.sizes:
            own, options = cell.strategy_options, each.strategy_options
            differing = {name: value for name, value in options.items() if own.get(name) != value}
            mesh = {} if each.mesh == cell.mesh else {"mesh": each.mesh or "as it is"}
            others[written({**differing, **mesh})] = each
    return others


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
