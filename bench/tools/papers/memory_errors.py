"""How far ours are from measured memory, as evidence for other numbers: errors by data-parallel backend, and
what published runs that trained or ran out of memory say of verdicts on others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.bands import PEAK, RESERVED
from spbench.bench.measure.trust.fit_certainty import FITS, NO, TIGHT, Evidence, Filled, kinds_of
from spbench.bench.tools.papers.comparison import read_comparisons
from spbench.bench.tools.papers.megatron_cases import GOLDEN_FILES, MEMORY
from spbench.bench.tools.papers.paper_findings import Line, distinct
from spbench.bench.tools.papers.past_errors import COUNTED
from spbench.bench.tools.papers.sources import publishers
from spbench.plots.series import grouped

#: what quantities of memory of published tables are
_MEMORY = {"peak_memory_gib": PEAK, "memory_gb": PEAK, "memory_mb": PEAK, "reserved_memory_gib": RESERVED}
#: quantities of memory whose errors are not counted, as settings were chosen by them
_SEEN = ("allocated_gib", "reserved_gib", "allocated_memory_gib")


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


def filled_runs(paths: Iterable[Path], cells: Mapping[str, Cell]) -> tuple[list[Filled], set[str]]:
    """The published runs that trained or ran out of memory, each once, and the kinds of program whose memory
    was measured.

    Args:
        paths: of files of `spbench reproduce`.
        cells: by key; a record whose cell is not there is left out.
    """
    source_of, runs, kinds = publishers(), dict[tuple[str, str], Filled](), set[str]()
    records = [r for path in paths for r in read_comparisons(path) if r.cell in cells and r.status_published]
    of_cell = {key: kinds_of(cells[key]) for key in {record.cell for record in records}}
    for record in records:
        if record.published and record.reproduced and record.quantity in (*_MEMORY, *_SEEN):
            kinds |= of_cell[record.cell]
        if record.status_published in ("ok", "oom") and record.filled_part is not None:
            source, oom = source_of(record.source), record.status_reproduced == "oom"
            backend = cells[record.cell].training.backend
            here = record.filled_part, of_cell[record.cell], backend, source
            runs.setdefault(
                (source, record.published_run), Filled(*here, record.status_published == "oom", oom)
            )
    return [*runs.values()], kinds


def certainty_lines(runs: Sequence[Filled], kinds: set[str]) -> list[Line]:
    """The verdicts on published runs that trained and that ran out of memory, each by a border of the other
    sources' runs."""
    words: dict[int, str] = {}
    for source, some in grouped(runs, lambda run: run.source).items():
        evidence = Evidence.of((run for run in runs if run.source != source), kinds)
        words |= {id(run): evidence.judged(run).word for run in some}
    lines = []
    for published, oom in (("trained", False), ("out of memory", True)):
        mine = [words[id(run)] for run in runs if run.published_oom is oom]
        counts = {word: mine.count(word) for word in (FITS, TIGHT, NO)}
        lines.append({"published": published, "runs": len(mine), **counts})
    return lines
