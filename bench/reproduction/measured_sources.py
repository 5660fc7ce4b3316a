"""Who measured the rows of results/measured, and how well other predictors do on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spbench.bench.published.published import published_rows

#: the name under which all measurements of real machines are reproduced, as one does a paper
MEASURED = "measured"
SOURCES_FILE = "sources.csv"
PREDICTORS_FILE = "other_predictors.csv"


@dataclass(frozen=True)
class MeasuredSource:
    """A file of measurements: who measured them, at which commit of their repository, on which machines."""

    file: str
    measured_by: str
    commit: str
    machines: str


@dataclass(frozen=True)
class OtherPredictor:
    """The relative errors of another predictor in one quantity.

    Attributes:
        quantity: in the words of :data:`bench.reproduction.validation.QUANTITY_NAMES`.
        file: of measurements that it predicted too; "" for errors on runs that are not here.
        errors: absolute relative errors on those measurements; empty for runs that are not here.
        mean, worst: what its authors state, for runs that are not here.
    """

    name: str
    compared: str
    quantity: str
    file: str
    errors: Sequence[float]
    mean: str
    worst: str
    source: str


def measured_sources() -> list[MeasuredSource]:
    """The sources of results/measured/sources.csv, in its order."""
    _, _, rows = published_rows(SOURCES_FILE, Path())
    return [MeasuredSource(row["file"], row["measured by"], row["commit"], row["machines"]) for row in rows]


def other_predictors() -> list[OtherPredictor]:
    """The predictors of results/measured/other_predictors.csv, in its order."""
    _, _, rows = published_rows(PREDICTORS_FILE, Path())
    return [
        OtherPredictor(
            row["predictor"],
            row["compared"],
            row["quantity"],
            row["file"],
            _errors(row["file"], row["predicted"], row["measured"]),
            row["mean"],
            row["worst"],
            row["source"],
        )
        for row in rows
    ]


def _errors(file: str, predicted: str, measured: str) -> list[float]:
    """|predicted / measured - 1| of the two columns' numbers; empty without a file."""
    if not file:
        return []
    _, _, rows = published_rows(file, Path())
    return [abs(float(row[predicted]) / float(row[measured]) - 1) for row in rows]
