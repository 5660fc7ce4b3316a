"""The page of cells: every row in a table that readers filter, sort and search, with details of each row."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.files import csv_text
from spbench.bench.row import commit_of, finite
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import TABLES, Page, from_template


def pages(gathered: Gathered) -> Iterator[Page]:
    """The page cells.html, with cells.csv and two scripts that have the same data."""
    of_page = TABLES.forms["columns"]["cells"]
    lines = [finite(cell.flat) for cell in gathered.cells]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    rows = [{name: line.get(name) for name in columns} for line in lines]
    data = {
        "columns": columns,
        "shown": [name for name in of_page["shown"] if name in columns],
        "values": [_column([row[name] for row in rows]) for name in columns],
    }
    details = _pooled([finite(_details(cell)) for cell in gathered.cells])
    choices = {name: sorted({str(row[name]) for row in rows if row.get(name)}) for name in of_page["chosen"]}
    several = {name: values for name, values in choices.items() if len(values) > 1}
    yield Page(
        "cells.html",
        "Cells",
        "cells.md",
        {
            "was_run": any(cell.origin == "runs" for cell in gathered.cells),
            "form": from_template("pages/cells_form.html", choices=several, cells=len(rows)),
        },
        order=90,
        summary="Every cell that was measured: one model on one machine with one method and one shape.",
        files={
            "cells.csv": csv_text(columns, rows),
            "data/cells.js": f"window.spbenchCells={script_json(data)};\n",
            "data/cell-details.js": f"window.spbenchDetails={script_json(details)};\n",
        },
        scripts=("data/cells.js", "data/cell-details.js", "assets/cells.js"),
    )


def _column(values: Sequence[Any]) -> dict[str, Any]:
    """The values of a column as ``values``; or, if most values are repeated, the distinct values (``of``) and
    for each line the index of its value among the distinct ones (``at``)."""
    texts = [json.dumps(value) for value in values]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    if 2 * len(places) > len(texts):
        return {"values": values}
    return {"of": [json.loads(text) for text in places], "at": [places[text] for text in texts]}


def _pooled(details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The details of all cells, with equal parts stored once: ``cells`` has for each cell and title an index
    into ``parts``, and a part is an index into ``heads`` (its names), with its values or lines."""
    heads, pool = dict[str, int](), dict[str, int]()

    def numbered(part: Mapping[str, Any]) -> int:
        is_table = "lines" in part
        head = json.dumps({"names": part["columns"] if is_table else [*part], "table": is_table})
        content = part["lines"] if is_table else [*part.values()]
        text = json.dumps([heads.setdefault(head, len(heads)), content])
        return pool.setdefault(text, len(pool))

    cells = [[numbered(part) for part in each.values()] for each in details]
    titles = list(details[0]) if details else []
    parts, named = ([json.loads(text) for text in texts] for texts in (pool, heads))
    return {"titles": titles, "heads": named, "parts": parts, "cells": cells}


def script_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """The JSON of a value, with signs escaped that could end a script of the site."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _details(cell: CellResult) -> dict[str, Any]:
    """The details of a row by title: each is a table (columns and lines), or values by name."""
    row, measured = cell.row, cell.row["measurement"]
    provenance = {**(row.get("provenance") or {}), "commit": commit_of(row), "time": row.get("time")}
    equal = Counter(tuple(line.items()) for line in measured.get("formula") or [])  # those of equal layers
    return {
        "": {"reason": row["reason"]} if row["reason"] else {},
        "Sent bytes a rank, by phase and collective": _compact(measured.get("communication") or []),
        "The strategy's closed form": _compact([{"times": n, **dict(line)} for line, n in equal.items()]),
        "Memory held at the peak, by category (bytes)": measured.get("peak_held") or {},
        "Time of a step (s)": {
            name: seconds and float(f"{seconds:.6g}")  # the page shows five digits
            for times in (measured.get("breakdown"), measured.get("parts"))
            for name, seconds in (times or {}).items()
        },
        "Losses by step": _compact(measured.get("losses") or []),
        "Settings": {
            f"{section}.{name}": value
            for section in ("model_options", "strategy_options", "training")
            for name, value in (row["cell"].get(section) or {}).items()
        },
        "Provenance": {name: value for name, value in provenance.items() if value},
    }


def _compact(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table as its ``columns`` and ``lines`` of values, a third of the bytes; {} if there are no lines."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return (
        {"columns": columns, "lines": [[line.get(name) for name in columns] for line in lines]}
        if lines
        else {}
    )
