"""The page of cells: every row, to be filtered, sorted and searched, with the details of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.files import csv_text
from spbench.bench.measure.sweep.provenance import commit_of
from spbench.bench.measure.sweep.results import finite
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import Page
from spbench.bench.tools.report.rendering import script_json

#: columns that readers choose values of, where there are several values
_CHOSEN = ("scenario", "model", "strategy", "cluster", "engine", "precision", "variant", "status", "origin")
#: columns that are shown at first
_SHOWN = (
    *("scenario", "model", "strategy", "world_size", "mesh", "batch", "seq_len", "cluster", "status"),
    *("answer", "peak_memory_bytes", "step_time_s", "step_time_low_s", "step_time_high_s", "bound"),
    *("tokens_per_s", "sent_bytes"),
)


def pages(gathered: Gathered) -> Iterator[Page]:
    """cells.html, with cells.csv and the scripts that hold the same data."""
    lines = [finite(cell.flat) for cell in gathered.cells]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    rows = [{name: line.get(name) for name in columns} for line in lines]
    data = {
        "columns": columns,
        "shown": [name for name in _SHOWN if name in columns],
        "rows": [[row[name] for name in columns] for row in rows],
    }
    details = [finite(_details(cell)) for cell in gathered.cells]
    yield Page(
        "cells.html",
        "Cells",
        "cells.html",
        {"count": len(rows), "choices": _choices(rows), "origins": {cell.origin for cell in gathered.cells}},
        order=90,
        summary="Every cell that was measured: one model on one machine with one method and one shape.",
        files={
            "cells.csv": csv_text(columns, rows),
            "data/cells.js": f"window.spbenchCells={script_json(data)};\n",
            "data/cell-details.js": f"window.spbenchDetails={script_json(details)};\n",
        },
    )


def _choices(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The values of each column that readers choose by."""
    choices = {name: sorted({str(row[name]) for row in rows if row.get(name)}) for name in _CHOSEN}
    return {name: values for name, values in choices.items() if len(values) > 1}


def _details(cell: CellResult) -> dict[str, Any]:
    """What is shown of a row that is chosen, a list of lines in each part."""
    row, measured = cell.row, cell.row["measurement"]
    provenance = {**(row.get("provenance") or {}), "commit": commit_of(row), "time": row.get("time")}
    settings = {
        f"{section}.{name}": value
        for section in ("model_options", "strategy_options", "training")
        for name, value in (row["cell"].get(section) or {}).items()
    }
    return {
        "sent": _compact(measured.get("communication") or []),
        "formula": _compact(measured.get("formula") or []),
        "memory": measured.get("peak_held") or {},
        "breakdown": {**(measured.get("breakdown") or {}), **(measured.get("parts") or {})},
        "settings": settings,
        "provenance": {name: value for name, value in provenance.items() if value},
        "reason": row["reason"],
    }


def _compact(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table as its columns and the values of each line, which takes a third of the room."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return {"columns": columns, "lines": [[line.get(name) for name in columns] for line in lines]}
