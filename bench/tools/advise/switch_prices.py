"""What the memory switches of a layout cost in time: steps with and without each, by traces of few layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.setting_changes import changed, written
from spbench.bench.tools.advise.looks import Look, outcomes
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.fit.answers import Answers
from spbench.bench.tools.fit.suggestions import savings_of
from spbench.impls.registries import backend_class


@dataclass(frozen=True)
class Price:
    """Of one switch.

    Attributes:
        settings: that are set with it, as ``--set`` takes them.
        used: whether the layout has it; then the step without is that with the switches named before it
            alone. Of another one the step without it is the layout's own.
        ratio: of the step's time to that without it.
        saved_bytes: of the peak.
    """

    settings: str
    used: bool
    ratio: float
    saved_bytes: int


def prices(question: Question, cell: Cell, answers: Answers) -> list[Price]:
    """What the switches of a layout cost, and what others would that save memory; those whose steps cannot be
    traced are left out.

    Args:
        cell: the layout.
        answers: whose run is :func:`look`.
    """
    chain = [*_chain(question.cell, cell)]
    pairs = [(*step, True) for step in pairwise(chain)]
    pairs += [(cell, other, False) for other in _others(question, cell)]
    looks = {each.key: Look.of(each, "few_layers") for *both, _ in pairs for each in both}
    seen = {
        look.cell.key: outcome.measurement
        for look, outcome in outcomes(answers, [*looks.values()])
        if outcome.status != "unsupported"
    }
    found = []
    for without, with_it, used in pairs:
        if without.key in seen and with_it.key in seen:
            before, after = seen[without.key], seen[with_it.key]
            saved = before["peak_memory_bytes"] - after["peak_memory_bytes"]
            ratio = after["step_time_s"] / before["step_time_s"]
            if used or saved > 0:
                found.append(Price(written(_differing(without, with_it)), used, ratio, saved))
    return found


def _chain(asked: Cell, cell: Cell) -> Iterator[Cell]:
    """The layout without its switches, and with one more each time: those of the backend first, as it is
    searched, and then those of the model, in their order."""
    plain, given = dict(asked.model_options), dict(cell.training.backend_options)
    searched = [*backend_class(cell.training.backend).options_type.searched()]
    rest = {name: value for name, value in given.items() if not any(name in each for each in searched)}
    kept = cell.training.model_dump(exclude_defaults=True, exclude={*given})
    for each in sorted(searched, key=len):
        if each.items() <= given.items():
            training = TrainingOptions.model_validate({**kept, **rest, **each})
            yield cell.model_copy(update={"model_options": plain, "training": training})
    base, options = cell.model_copy(update={"model_options": plain}), {}
    switches = [name for name, value in cell.model_options.items() if plain.get(name) != value]
    for name, following in zip_longest(switches, switches[1:], fillvalue=""):
        options[f"model_options.{name}"] = cell.model_options[name]
        # recompute_layers and recompute_method say how what recompute switches on is done
        if not following.startswith(f"{name.partition('_')[0]}_"):
            try:
                yield changed(base, options)
            except UserError:  # it needs the next one
                continue


def _others(question: Question, cell: Cell) -> Iterator[Cell]:
    """The layout with each of the switches that it has not; another backend is another layout, and of partial
    recomputation the search tries each."""
    for change in savings_of(cell):
        apart = {*change.settings} & {"training.backend", "model_options.recompute_layers"}
        if question.keeps(change.settings) and not apart:
            try:
                yield changed(cell, change.settings)
            except UserError:  # of options that exclude each other
                continue


def _differing(without: Cell, with_it: Cell) -> dict[str, Any]:
    """What is set with a switch, by dotted name."""
    return {
        f"{section}.{name}": value
        for section, before, after in (
            ("training", without.training.backend_options, with_it.training.backend_options),
            ("model_options", without.model_options, with_it.model_options),
            ("strategy_options", without.strategy_options, with_it.strategy_options),
        )
        for name, value in after.items()
        if before.get(name) != value
    }
