"""What answers are compared with: a scenario's results, our numbers in them, and the roles of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.published_number import InferredSetting, PublishedNumber
from spbench.bench.row import Row
from spbench.bench.tools.papers.comparison import Role
from spbench.bench.tools.papers.selector import Selector

#: fields of a measurement that a cluster's scalars and rates change
TIMED = ("step_time_s", "tokens_per_s", "samples_per_s")
#: limits of a cluster that change nothing but what fits, and the field that says what does
CAPACITIES = ("device.memory_total_bytes", "device.memory_context_bytes", "device.memory_peer_bytes")
CAPACITY_FIELD = "answer"


@dataclass(frozen=True)
class OurNumber:
    """A field of the measurement of one cell.

    Attributes:
        cell: None where a selector names none or several.
        value: None where there is none; ``missing`` says why, else it is "".
    """

    cell: Cell | None
    value: Any
    missing: str = ""


@dataclass(frozen=True)
class ScenarioResults:
    """What the answers of a scenario are compared with.

    Attributes:
        cells: the declared cells.
        rows: the results by key, of as many of the cells as have any.
        folder: the scenario file's, where published files of its own may be.
    """

    cells: Sequence[Cell]
    rows: Mapping[str, Row]
    folder: Path
    inferences: Sequence[InferredSetting] = ()

    @property
    def variant(self) -> str:
        """The variant of the first cell, and of all in a part of :meth:`split`."""
        return self.cells[0].variant

    def split(self) -> list[ScenarioResults]:
        """The results by variant, cluster and engine, in the order of the cells."""
        settings = dict.fromkeys(map(_setting, self.cells))
        return [replace(self, cells=[c for c in self.cells if _setting(c) == s]) for s in settings]

    def measured(self, selector: Selector, field: str) -> OurNumber:
        """A field of the one cell that a selector names."""
        selected = selector.select(self.cells)
        if len(selected) != 1:
            return OurNumber(None, None, f"is {len(selected) or 'no'} cells ({selector})")
        return self.measured_at(selected[0], field)

    def measured_at(self, cell: Cell, field: str) -> OurNumber:
        """A field of a cell's measurement."""
        if cell.key not in self.rows:
            return OurNumber(cell, None, "was not run")
        row = self.rows[cell.key]
        value = row["measurement"].get(field)
        if value in (None, []) or row["status"] not in ("ok", "oom"):
            reason = f": {row['reason']}" if row["reason"] else ""
            return OurNumber(cell, None, f"has no {field}, {row['status']}{reason}")
        return OurNumber(cell, value)

    def role(self, answer: str, number: PublishedNumber, field: str, cells: Sequence[Cell]) -> Role:
        """calibrated, where a scalar or rate of the cells' cluster was fitted on one of the cells; else
        inferred, where the number was looked at to choose a setting; else predicted.

        Args:
            answer: the name of the claim or table that the number belongs to.
            field: the field of the cells' measurements that is compared.
            cells: one, or the two of a ratio.
        """
        if any(cell.key in fitted_cells(cell, field) for cell in cells):
            return "calibrated"
        for cell in cells:
            for inference in (*self.inferences, *load_cluster(cell.cluster).inferences):
                if inference.covers(answer, number, cell.variant):
                    return "inferred"
        return "predicted"


def fitted_cells(cell: Cell, field: str) -> set[str]:
    """The keys of the cells whose published numbers decided what the cell's cluster adds to a field."""
    cluster = load_cluster(cell.cluster)
    keys: set[str] = set()
    for name, sourced in cluster.sourced():
        if field == CAPACITY_FIELD if name in CAPACITIES else field in TIMED:
            keys |= set(sourced.fitted_on)
    if field in TIMED:
        keys |= set(cluster.calibration_of(cell.precision).fitted_on)
    return keys


def _setting(cell: Cell) -> tuple[str, str, str]:
    return cell.variant, cell.cluster, cell.engine
