"""How far ours are from measured memory, as evidence for other numbers: errors by data-parallel backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.bands import PEAK, RESERVED
from spbench.bench.tools.papers.comparison import read_comparisons
from spbench.bench.tools.papers.megatron_cases import GOLDEN_FILES, MEMORY
from spbench.bench.tools.papers.paper_findings import distinct
from spbench.bench.tools.papers.past_errors import COUNTED

#: what quantities of memory of published tables are
_MEMORY = {"peak_memory_gib": PEAK, "memory_gb": PEAK, "memory_mb": PEAK, "reserved_memory_gib": RESERVED}


def memory_errors(
    paths: Iterable[Path], cells: Mapping[str, Cell], of_cases: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, list[float]]]:
    """The relative errors of the counted numbers of files of `spbench reproduce`, each published number once,
    by backend and quantity, in ascending order; of a run's ranks the one that is furthest off.

    Args:
        cells: by key; a record whose cell is not there is left out.
        of_cases: lines of megatron_cases_errors.csv, which stand for the golden values of other files.
    """
    # by backend, quantity and run
    errors: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in of_cases:
        if line["quantity"] in MEMORY[:2]:  # which are peaks
            run = "{case} {golden} {quantity}".format(**line)
            errors["megatron", PEAK][run].append(float(line["error"]))
    for path in paths:
        counted = (r for r in read_comparisons(path) if r.quantity in _MEMORY and r.role in COUNTED)
        for record in distinct([record for record in counted if record.cell in cells]):
            file, row, column, *_ = record.source.split(":")
            if record.published and record.reproduced and not (of_cases and file in GOLDEN_FILES):
                kind = cells[record.cell].training.backend, _MEMORY[record.quantity]
                error = record.reproduced / record.published - 1
                errors[kind][f"{file} {row} {column}"].append(error)
    by_backend: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (backend, quantity), runs in sorted(errors.items()):
        furthest = (max(some, key=abs) for some in runs.values())
        by_backend[backend][quantity] = sorted(float(f"{error:.6g}") for error in furthest)
    return dict(by_backend)
