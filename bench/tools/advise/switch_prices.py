"""What the memory switches of a layout cost in time, and what other attention kernels would: steps with and
without each, by traces of few layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.clusters.kinds_of_work import cannot_run
from spbench.bench.measure.scenarios.scenario import changed, written
from spbench.bench.tools.advise.look import BY_KERNEL, looks
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.fit.asking import Asking
from spbench.bench.tools.fit.suggestions import dotted, savings_of
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backend_class

#: stages of a pipeline up to which switches are priced that a layout has not: with more, each takes as
#: long as a tenth of a search
_FEW_STAGES = 4


@dataclass(frozen=True)
class SwitchPrice:
    """What one switch costs.

    Attributes:
        settings: that are set with it, as ``--set`` takes them.
        used: whether the layout has it; then the step without is that with the switches named before it
            alone. For a switch that it has not, the step without it is the layout's own.
        ratio: of the step's time to that without it.
        saved_bytes: of the peak.
    """

    settings: str
    used: bool
    ratio: float
    saved_bytes: int


def _measured(cells: Iterable[Cell], asking: Asking) -> dict[str, Mapping[str, Any]]:
    """The measurements of the cells that can be traced, by key."""
    outcomes = looks(asking, cells, "few_layers")
    return {cell.key: outcome.measurement for cell, outcome in outcomes if outcome.status != "unsupported"}


def prices(question: Question, cell: Cell, asking: Asking) -> list[SwitchPrice]:
    """What the switches of a layout cost, and what others would that save memory, but with many stages;
    those whose steps cannot be traced are left out.

    Args:
        cell: the layout.
    """
    pairs = [(*step, True) for step in pairwise(_chain(question.cell, cell))]
    if cell.sizes.pp <= _FEW_STAGES:
        pairs += [(cell, other, False) for other in _others(question, cell)]
    seen = _measured([each for *both, _ in pairs for each in both], asking)
    priced = []
    for without, with_it, used in pairs:
        if without.key in seen and with_it.key in seen:
            before, after = seen[without.key], seen[with_it.key]
            saved = before["peak_memory_bytes"] - after["peak_memory_bytes"]
            ratio = after["step_time_s"] / before["step_time_s"]
            if used or saved > 0:
                priced.append(SwitchPrice(written(_differing(without, with_it)), used, ratio, saved))
    return priced


def other_kernels(cell: Cell) -> list[str]:
    """The attention kernels that the card has rates of, the cell's own among them; none where its model has
    no such kernel, or the card rates of one."""
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    rates_of = device.attention
    if rates_of is None or model.attention_kernel not in rates_of.kernels or not hasattr(model, "attention"):
        return []
    kernels = [
        str(name) for name, rates in rates_of.kernels.items() if rates and not cannot_run(device, name)
    ]
    return kernels if len(kernels) > 1 else []


def by_kernel(cell: Cell, measurement: Mapping[str, Any]) -> dict[str, float]:
    """By each other attention kernel, the time of a step over that by the layout's own, the shortest first.

    Args:
        measurement: of a look at the layout with :func:`other_kernels`.
    """
    own = model_preset(*cell.model_arguments).attention_kernel
    seconds = measurement.get("meters", {}).get(BY_KERNEL, {})
    if own not in seconds:
        return {}
    ratios = {name: s / seconds[own] for name, s in seconds.items() if name != own}
    return dict(sorted(ratios.items(), key=lambda each: each[1]))


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
    sections = {
        "training": (without.training.backend_options, with_it.training.backend_options),
        "model_options": (without.model_options, with_it.model_options),
        "strategy_options": (without.strategy_options, with_it.strategy_options),
    }
    return {
        name: value
        for section, (before, after) in sections.items()
        for name, value in dotted(section, {k: v for k, v in after.items() if before.get(k) != v}).items()
    }
