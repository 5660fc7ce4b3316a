"""github-action-benchmark: a file for its tool customSmallerIsBetter and one for customBiggerIsBetter.

Each is an array of ``{name, value, unit, range, extra}``, as its README shows under "Examples".
Its charts are lines of one name over commits: SUITE/CELL/METRIC, where the cell is a key with a digest of all
settings. Values keep all their digits, so that an alert threshold of 100% finds a single byte.
"""

from __future__ import annotations

import json
from typing import Any

from spbench.bench.tools.changes.export_command import Exported, ExportedValue, ExportRequest
from spbench.plots.series import grouped

#: the file of each direction, called after the tool that reads it
FILES = {"smaller": "customSmallerIsBetter.json", "bigger": "customBiggerIsBetter.json"}


def export(request: ExportRequest) -> Exported:
    """A file a tool; one without entries is left out, as the action refuses it.

    Raises:
        UserError: no cell has a value.
    """
    by_file = grouped(request.values(), lambda value: FILES[value.reading.metric.better])
    contents = {file: json.dumps([*map(_entry, some)], indent=1) + "\n" for file, some in by_file.items()}
    return Exported(contents, request.left_out())


def _entry(value: ExportedValue) -> dict[str, Any]:
    reading, origin, samples = value.reading, value.origin, value.reading.samples
    extra = {
        "status": value.row["status"],
        "commit": origin.shown_commit,
        "machine": "any (the value is exact)" if reading.exact else origin.host or "unknown",
        **origin.versions,
    }
    entry = {
        "name": f"{value.suite.name}/{value.row['key']}/{reading.metric.name}",
        "value": value.number,
        "unit": reading.unit,
        "extra": "\n".join(f"{name}: {text}" for name, text in extra.items()),
    }
    if samples:
        entry["range"] = f"{min(samples):.6g} to {max(samples):.6g} in {len(samples)} samples"
    return entry
