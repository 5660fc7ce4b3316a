"""What an answer is compared with, the results of a scenario, and what a comparison is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spbench.bench.cell import Cell
from spbench.bench.inferred import InferredSetting
from spbench.bench.published.roles import decided_by
from spbench.bench.published_number import PublishedNumber

#: calibrated: a scalar of the cluster was fitted to this number; inferred: a setting was chosen by looking at
#: it; predicted: neither; formula: a closed form; curve: the losses of training runs
Role = Literal["calibrated", "inferred", "predicted", "formula", "curve"]


@dataclass(frozen=True)
class Comparison:
    """One number that was published, or a status, beside ours, in one variant.

    Attributes:
        published: None where a published table has a status and no number.
        reproduced: our number, or None where there is none; the note says why.
        relative_error: reproduced / published - 1.
        numerator, denominator: the keys of the cells that it comes from.
        table: the published table that it belongs to, followed by ": " and what tells it from other
            numbers of its cell, if there are any (a machine, a rank, a step). "" for a claim.
        cell: the cell's key; of a ratio both, with " / " between them.
        quantity: what is compared: a column of the published table, ratio, max_batch, ...
        status_published, status_reproduced: ok, oom or unstated, and ours; "" where there is none.
        source: FILE:ROW:COLUMN of the published number, by which it is counted once; "" where there is none.
    """

    claim: str
    published: float | None
    reproduced: float | None
    relative_error: float | None
    role: Role
    note: str
    variant: str
    numerator: str
    denominator: str
    table: str = ""
    cell: str = ""
    strategy: str = ""
    quantity: str = ""
    status_published: str = ""
    status_reproduced: str = ""
    source: str = ""


def relative_error(published: float | None, reproduced: float | None) -> float | None:
    """reproduced / published - 1; None where one of them is missing or nothing can be divided by."""
    return reproduced / published - 1 if reproduced is not None and published else None


@dataclass(frozen=True)
class ScenarioResults:
    """What the answers of a scenario are compared with.

    Attributes:
        cells: the declared cells.
        rows: the results by key, of as many of the cells as have any.
        folder: the scenario file's, where published files of its own may be.
    """

    cells: Sequence[Cell]
    rows: Mapping[str, dict[str, Any]]
    folder: Path
    inferences: Sequence[InferredSetting] = ()

    def split(self) -> list[ScenarioResults]:
        """The results by variant, cluster and engine, in the order of the cells."""
        settings = dict.fromkeys(map(_setting, self.cells))
        return [replace(self, cells=[c for c in self.cells if _setting(c) == s]) for s in settings]

    def role(self, answer: str, number: PublishedNumber, field: str, cells: Sequence[Cell]) -> Role:
        """The role of a published number that these cells are compared with.

        Args:
            field: the compared field of their measurements.
        """
        return decided_by(self.inferences, answer, number, field, cells)


def _setting(cell: Cell) -> tuple[str, str, str]:
    return cell.variant, cell.cluster, cell.engine
