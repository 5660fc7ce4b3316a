"""How far predicted memory is from the measured, by data-parallel backend: what `spbench fit` says beside an
answer (:mod:`spbench.bench.trust.memory_errors`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.published.comparison import read_records
from spbench.bench.reproduction.findings import distinct
from spbench.bench.reproduction.step_errors import COUNTED
from spbench.bench.trust.memory_errors import PEAK, RESERVED

#: of published tables, by what they are there
_QUANTITIES = {
    "peak_memory_gib": PEAK,
    "memory_gb": PEAK,
    "memory_mb": PEAK,
    "reserved_memory_gib": RESERVED,
}


def memory_errors(paths: Iterable[Path], cells: Mapping[str, Cell]) -> dict[str, dict[str, list[float]]]:
    """The relative errors of the counted numbers of files of `spbench reproduce`, each published number once,
    by backend and quantity, in ascending order.

    Args:
        cells: by key; a record whose cell is not there is left out.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for path in paths:
        records = [
            record
            for record in read_records(path)
            if record["quantity"] in _QUANTITIES and record["role"] in COUNTED and record["cell"] in cells
        ]
        for record in distinct(records):
            if record["published"] and record["reproduced"]:
                backend = cells[record["cell"]].training.backend
                errors = found.setdefault(backend, {}).setdefault(_QUANTITIES[record["quantity"]], [])
                errors.append(float(f"{record['reproduced'] / record['published'] - 1:.6g}"))
    return {
        backend: {quantity: sorted(errors) for quantity, errors in sorted(of_backend.items())}
        for backend, of_backend in sorted(found.items())
    }
