"""Strategies beside each other: the committed rows of two scenarios, and traces of a layer, for the report;
``spbench reproduce strategies`` writes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.files import write_whole
from spbench.bench.measure.engines.virtual import trace_classes
from spbench.bench.measure.simulator.trace_export import trace_events
from spbench.bench.measure.sweep.results import RESULTS_FILE
from spbench.bench.row import Row, json_line

#: the argument of `spbench reproduce`, and the folder
STRATEGIES = "strategies"
#: the scenario of rows, and that whose cells are traced too
SIDE_BY_SIDE, LAYERS = "side_by_side", "layers"

_KEPT = ("key", "cell", "status", "reason", "measurement", "digest", "time")
_PROVENANCE = ("commit", "torch")


def write_kept(rows: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Write the rows of both scenarios, and the traces of the cells of :data:`LAYERS` that ran. UserError if
    a file cannot be written; an earlier one is unchanged."""
    files = [_write_rows(some, folder / name / RESULTS_FILE) for name, some in rows.items()]
    cells = [Cell.model_validate(row["cell"]) for row in rows[LAYERS] if row["status"] in ("ok", "oom")]
    return files + [write_trace(cell, folder) for cell in cells]


def _write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write rows in the order of their scenario, without what depends on the machine that made them."""
    lines = []
    for row in rows:
        made_by = {name: (row.get("provenance") or {}).get(name) for name in _PROVENANCE}
        kept = {name: row[name] for name in _KEPT if name in row} | {"provenance": made_by}
        lines.append(json_line(kept, sort_keys=True))
    return write_whole(path, "".join(lines))


def trace_path(folder: Path, cell: Cell) -> Path:
    """Where the trace of a cell's layer is: named by its strategy, and by the options of that."""
    chosen = (str(value) for _, value in sorted(cell.strategy_options.items()))
    return folder / LAYERS / f"{'-'.join([cell.strategy, *chosen])}.json.gz"


def write_trace(cell: Cell, folder: Path) -> Path:
    """Simulate a step of a cell, and write the trace of all of its ranks, compressed.

    ``otherData`` has the cell's key, the step time and what the time of each rank goes to, in seconds.
    Unsupported if the strategy cannot run the cell. UserError if the file cannot be written."""
    timeline = trace_classes(cell, events=True).simulator()()
    ranks = range(timeline.world_size)
    other = {
        "cell": cell.key,
        "step_time_s": timeline.step_time_s,
        "by_rank": [timeline.breakdown_of(rank) for rank in ranks],
    }
    content = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [*trace_events(timeline, ranks)]}
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # no time in the file's head: the same trace has the same bytes
    path = trace_path(folder, cell)
    return write_whole(path, gzip.compress(text.encode(), mtime=0))


def read_trace(folder: Path, cell: Cell) -> Mapping[str, Any] | None:
    """The trace of a cell's layer; None: there is none of it that can be read."""
    try:
        content = json.loads(gzip.decompress(trace_path(folder, cell).read_bytes()))
        is_its = {"otherData", "traceEvents"} <= content.keys() and content["otherData"]["cell"] == cell.key
        return content if is_its else None
    except (OSError, EOFError, ValueError, AttributeError, KeyError, TypeError):
        return None
