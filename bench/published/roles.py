"""Roles: whether a published number decided anything of what is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.inferred import InferredSetting
from spbench.bench.published_number import PublishedNumber

#: fields of a measurement that a cluster's scalars and rates change
TIMED = ("step_time_s", "tokens_per_s", "samples_per_s")
#: figures of a cluster that change nothing but what fits, and the field that says what does
CAPACITIES = ("device.memory_total_bytes", "device.memory_context_bytes")
CAPACITY_FIELD = "answer"


def decided_by(
    inferences: Sequence[InferredSetting],
    answer: str,
    number: PublishedNumber,
    field: str,
    cells: Sequence[Cell],
) -> Literal["calibrated", "inferred", "predicted"]:
    """calibrated, where a scalar or figure of the cells' cluster was fitted on one of the cells; else
    inferred, where the number was looked at to choose a setting; else predicted.

    Args:
        inferences: the scenario's; those of the cells' clusters are added.
        answer: the name of the claim or table that the number belongs to.
        field: the field of the cells' measurements that is compared.
        cells: one, or the two of a ratio.
    """
    if any(cell.key in fitted_cells(cell, field) for cell in cells):
        return "calibrated"
    for cell in cells:
        for inference in [*inferences, *load_cluster(cell.cluster).inferences]:
            if inference.covers(answer, number, cell.variant):
                return "inferred"
    return "predicted"


def fitted_cells(cell: Cell, field: str) -> set[str]:
    """The keys of the cells whose published numbers decided what the cell's cluster adds to a field."""
    cluster = load_cluster(cell.cluster)
    found: set[str] = set()
    for name, figure in cluster.figures():
        if field == CAPACITY_FIELD if name in CAPACITIES else field in TIMED:
            found |= set(figure.fitted_on)
    if field in TIMED:
        found |= set(cluster.calibration_of(cell.precision).fitted_on)
    return found
