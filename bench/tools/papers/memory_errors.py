"""How far predicted memory is from the measured, by data-parallel backend: what `spbench fit` says beside an
answer (:mod:`measure.trust.bands`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.bands import PEAK, RESERVED
from spbench.bench.tools.papers.comparison import read_records
from spbench.bench.tools.papers.megatron_cases import GOLDEN_FILES, MEMORY
from spbench.bench.tools.papers.paper_findings import distinct
from spbench.bench.tools.papers.step_errors import COUNTED

#: of those cases, the quantities that are peaks
CASE_PEAKS = MEMORY[:2]
#: of published tables, by what they are there
_QUANTITIES = {
    "peak_memory_gib": PEAK,
    "memory_gb": PEAK,
    "memory_mb": PEAK,
    "reserved_memory_gib": RESERVED,
}


def memory_errors(
    paths: Iterable[Path], cells: Mapping[str, Cell], of_cases: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, list[float]]]:
    """The relative errors of the counted numbers of files of `spbench reproduce`, each published number once,
    by backend and quantity, in ascending order; of a run's ranks the one that is furthest off.

    Args:
        cells: by key; a record whose cell is not there is left out.
        of_cases: lines of megatron_cases_errors.csv, which stand for the golden values of other files.
    """
    furthest: dict[tuple[str, str, str], float] = {}

    def add(backend: str, quantity: str, run: str, error: float) -> None:
        key = backend, quantity, run
        furthest[key] = max(furthest.get(key, 0.0), error, key=abs)

    for line in of_cases:
        if line["quantity"] in CASE_PEAKS:
            add("megatron", PEAK, "{case} {golden} {quantity}".format(**line), float(line["error"]))
    for path in paths:
        records = [
            record
            for record in read_records(path)
            if record["quantity"] in _QUANTITIES and record["role"] in COUNTED and record["cell"] in cells
        ]
        for record in distinct(records):
            file, row, column, *_ = record["source"].split(":")
            if record["published"] and record["reproduced"] and not (of_cases and file in GOLDEN_FILES):
                backend, quantity = cells[record["cell"]].training.backend, _QUANTITIES[record["quantity"]]
                error = record["reproduced"] / record["published"] - 1
                add(backend, quantity, f"{file} {row} {column}", error)
    found: dict[str, dict[str, list[float]]] = {}
    for (backend, quantity, _), error in furthest.items():
        found.setdefault(backend, {}).setdefault(quantity, []).append(float(f"{error:.6g}"))
    return {
        backend: {quantity: sorted(errors) for quantity, errors in sorted(of_backend.items())}
        for backend, of_backend in sorted(found.items())
    }
