"""Are the ways to split a run in the right order? Kendall's tau of published and simulated times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy.stats import kendalltau

from spbench.bench.cell import Cell
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import ALL, Narrowing, declared_cells
from spbench.bench.measure.trust.bands import run_of
from spbench.bench.tools.papers.paper_findings import Line, Record, table_of

#: the quantity of which splits are compared, by sample of the batch
STEP_TIME = "step_time_ms"


@dataclass(frozen=True)
class Order:
    """The splits of a run: one model and options, length, number of GPUs, cluster and variant.

    Attributes:
        table: the published one.
        splits: of each its cell, and the published and the simulated time of a sample; several.
    """

    table: str
    splits: list[tuple[Cell, float, float]]

    @property
    def tau(self) -> float:
        """Kendall's tau-b, of which ties do not count against the order: 1: the same order, -1: the reverse;
        nan where all of one kind are ties."""
        return float(kendalltau([s[1] for s in self.splits], [s[2] for s in self.splits]).statistic)

    @property
    def fastest_published(self) -> Cell:
        """The split whose published time is shortest."""
        return min(self.splits, key=lambda split: split[1])[0]

    @property
    def fastest_ours(self) -> Cell:
        """The split whose simulated time is shortest."""
        return min(self.splits, key=lambda split: split[2])[0]

    @property
    def distance(self) -> float:
        """How much longer than the shortest published time that of our fastest split is, as a part of it."""
        chosen = min(self.splits, key=lambda split: split[2])
        return chosen[1] / min(split[1] for split in self.splits) - 1


def orders(records: Iterable[Record], cells: Mapping[str, Cell]) -> list[Order]:
    """The runs of some records that were split in several ways.

    Args:
        cells: by key; a record whose cell is not there is left out.
    """
    runs: dict[str, Order] = {}
    for record in records:
        cell, published, ours = cells.get(record["cell"]), record["published"], record["reproduced"]
        if record["quantity"] != STEP_TIME or cell is None or published is None or ours is None:
            continue
        batch = cell.batch or 1
        run = runs.setdefault(run_name(record, cell), Order(table_of(record), []))
        run.splits.append((cell, published / batch, ours / batch))
    return [run for run in runs.values() if len({_split(cell) for cell, _, _ in run.splits}) > 1]


def run_name(record: Record, cell: Cell) -> str:
    """What the records of one run have in common: their table and variant, and :func:`run_of` their cells."""
    return str((table_of(record), cell.variant, *run_of(cell.model_dump(mode="json"))))


def _split(cell: Cell) -> str:
    return f"{cell.strategy} {cell.mesh_text}"


def order_lines(records: Iterable[Record], cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each run of :func:`orders`: how many splits, tau, the fastest as published and as simulated,
    and how much longer than the fastest the latter's published time is."""
    return [
        {
            "table": order.table,
            "model": (cell := order.splits[0][0]).model,
            "cluster": cell.cluster,
            "seq_len": cell.seq_len,
            "GPUs": cell.sizes.world,
            "splits": len(order.splits),
            "tau": shown_tau(order.tau),
            "fastest published": order.fastest_published.mesh_text,
            "fastest ours": order.fastest_ours.mesh_text,
            "published time of ours": f"{order.distance:+.1%}",
        }
        for order in orders(records, cells)
    ]


def orders_by_scenario(scenarios: Iterable[Scenario], records: Sequence[Record]) -> dict[str, list[Line]]:
    """The :func:`order_lines` of each scenario that has any, by its name."""
    found = {}
    for scenario in scenarios:
        cells = {cell.key: cell for cell in declared_cells(scenario, Narrowing(variant=ALL))}
        if lines := order_lines((r for r in records if r["scenario"] == scenario.name), cells):
            found[scenario.name] = lines
    return found


def mean_tau(of: Iterable[Order]) -> float:
    """The mean of the taus of some runs that have one; nan if none has."""
    taus = [order.tau for order in of if not math.isnan(order.tau)]
    return fmean(taus) if taus else math.nan


def shown_tau(tau: float) -> str:
    """Tau with two digits after the point; "" where there is none."""
    return "" if math.isnan(tau) else f"{tau:.2f}"
