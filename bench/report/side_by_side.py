"""Strategies beside each other: each on four virtual ranks, at the shapes of scenarios/side_by_side.yaml.

What is shown is measured when the site is built, so that every strategy that is found has it, those of
plug-ins too; all of them take some seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spbench.bench.cell import Cell, Sizes
from spbench.bench.config.scenario import load_scenario
from spbench.bench.engines.virtual import VirtualEngine
from spbench.bench.report.one_layer import layer_timeline
from spbench.bench.simulator.timeline import Timeline
from spbench.bench.sweep.results import Row
from spbench.bench.sweep.sweep import as_row
from spbench.bench.workers.worker import measure
from spbench.impls.layout import Unsupported
from spbench.impls.strategies.nesting import nesting

SCENARIO = "side_by_side"
RANKS = 4

#: statuses of cells that a strategy has run
_RAN = ("ok", "oom", "mismatch")


@dataclass(frozen=True)
class Demonstration:
    """A strategy at the first shape of which it can run a layer.

    Attributes:
        cell: None: it can run none of them.
        row: the result row of the cell.
        beside: the rows of all strategies that can run that shape, by their names.
        layer: one layer of the cell's model; None: there is no cell, or the layer failed.
        problems: why it could not run earlier shapes, or what failed, a line each.
    """

    strategy: str
    cell: Cell | None
    row: Row
    beside: Mapping[str, Row]
    layer: Timeline | None
    problems: Sequence[str]


def demonstrations(strategies: Iterable[str]) -> list[Demonstration]:
    """Of each of the strategies, in their order."""
    names = list(strategies)
    rows = [(shape, {name: _measured(on_ranks(shape, name)) for name in names}) for shape in shapes()]
    return [_first(name, rows) for name in names]


def shapes() -> Sequence[Cell]:
    """The cells of the scenario, each of one device."""
    (cells,) = load_scenario(SCENARIO).cells.values()
    return cells


def on_ranks(shape: Cell, strategy: str) -> Cell:
    """The shape with a strategy on :data:`RANKS` ranks: all along its axis, or split over its axes, two along
    each where more axes need more ranks; the single device on one."""
    found = nesting(strategy)
    meshes = found.meshes(RANKS) or found.meshes(2 ** len(found.axes))
    return shape.model_copy(update={"strategy": strategy, "sizes": Sizes(**meshes[0])})


def _measured(cell: Cell) -> Row:
    return as_row(cell, measure(VirtualEngine().measure, cell))


def _first(strategy: str, rows: Sequence[tuple[Cell, Mapping[str, Row]]]) -> Demonstration:
    problems = []
    for shape, by_strategy in rows:
        row, cell = by_strategy[strategy], on_ranks(shape, strategy)
        if row["status"] not in _RAN:
            problems.append(f"{shape.model}: {row['status']}: {row['reason']}")
            continue
        layer = None
        try:
            layer = layer_timeline(cell)
        except Unsupported as refusal:
            problems.append(f"{shape.model}: {refusal}")
            continue
        except Exception as error:  # of a plug-in, for one: its page says so, and the others are made
            problems.append(f"{shape.model}: the layer failed: {type(error).__name__}: {error}")
        beside = {name: each for name, each in by_strategy.items() if each["status"] in _RAN}
        return Demonstration(strategy, cell, row, beside, layer, problems)
    return Demonstration(strategy, None, {}, {}, None, problems)
