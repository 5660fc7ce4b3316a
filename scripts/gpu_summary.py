"""The results of scripts/gpu_check.sh in one page and one table.

    python scripts/gpu_summary.py FOLDER

Writes summary.md, and memory.csv: for each cell the peaks of allocated and of reserved bytes on the device,
and the peaks of the same rank on fake tensors. Exit code 1: a part failed, a strategy is not green, or a
measured peak is further than PEAK_TOLERANCE from the virtual peak.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from spbench.bench.cell import Cell
from spbench.bench.measure.sweep.results import read_rows
from spbench.bench.row import Row
from spbench.bench.tools.papers.paper_findings import Line, markdown

#: the largest relative error of the peak of allocated bytes: fake tensors have no workspaces of libraries
PEAK_TOLERANCE = 0.05

_PARTS = ["part", "exit_code", "seconds", "limit_s"]
_OUT_OF_TIME = (124, 130, 137)


def pairs(rows: list[Row]) -> list[dict[str, Any]]:
    """A line for each cell that has rows of both engines: peaks in bytes, and measured / virtual - 1."""
    by_engine: dict[str, dict[str, Row]] = {"virtual": {}, "emulated": {}}
    for row in rows:
        cell = Cell.model_validate(row["cell"])
        same = cell.model_copy(update={"engine": "", "device": "cpu", "rank": None})
        by_engine.setdefault(cell.engine, {})[same.key] = row
    lines = []
    for key, measured in by_engine["emulated"].items():
        virtual = by_engine["virtual"].get(key)
        if virtual is None:
            continue
        cell = Cell.model_validate(measured["cell"])
        line: dict[str, Any] = {
            "model": cell.model,
            "strategy": cell.strategy,
            "mesh": cell.mesh_text,
            "batch": cell.batch,
            "seq_len": cell.seq_len,
            "virtual": virtual["status"],
            "measured": measured["status"],
        }
        for name in ("peak_memory_bytes", "reserved_memory_bytes"):
            ours, theirs = virtual["measurement"].get(name), measured["measurement"].get(name)
            line |= {f"virtual_{name}": ours, f"measured_{name}": theirs}
            line[f"{name}_error"] = theirs / ours - 1 if ours and theirs else None
        lines.append(line)
    return lines


def summary(folder: Path) -> tuple[str, bool]:
    """The text of the page, and whether all parts, strategies and peaks are right."""
    parts = pd.read_csv(folder / "parts.csv", names=_PARTS)
    well = bool((parts["exit_code"] == 0).all())
    lines = [_said(part) for part in parts.to_dict("records")]
    text = [f"# {folder.name}", "", markdown(lines)]
    verified = folder / "verify.txt"
    if verified.exists() and verified.stat().st_size:
        cases = pd.read_csv(verified)
        counts = Counter(cases["status"])
        text += ["", "Verified: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + "."]
        red = cases[cases["status"] == "RED"]
        text += [
            f"- RED: {case['strategy']} {case['model']} {case['dtype']}" for case in red.to_dict("records")
        ]
    rows, problems = read_rows(folder / "memory" / "cells.jsonl")
    compared = pd.DataFrame(pairs(rows))
    if not compared.empty:
        compared.to_csv(folder / "memory.csv", index=False)
        errors = compared["peak_memory_bytes_error"].dropna().abs()
        differing = compared[compared["virtual"] != compared["measured"]]
        text += ["", _errors(errors, len(compared)), ""]
        text += [
            f"- {line['strategy']} {line['mesh']}: {line['virtual']} virtually, {line['measured']} measured"
            for line in differing.to_dict("records")
        ]
        well = well and bool((errors <= PEAK_TOLERANCE).all()) and differing.empty
    text += [f"- {problem}" for problem in problems]
    return "\n".join(text) + "\n", well


def _said(part: dict[str, Any]) -> Line:
    code = part["exit_code"]
    end = "well" if code == 0 else "out of time" if code in _OUT_OF_TIME else f"exit code {code}"
    return {
        "part": part["part"],
        "ended": end,
        "seconds": str(part["seconds"]),
        "limit": str(part["limit_s"]),
    }


def _errors(errors: pd.Series, cells: int) -> str:
    if errors.empty:
        return f"Peak memory: none of {cells} cells was measured."
    return (
        f"Peak memory, measured on the device against the virtual rank: {len(errors)} of {cells} cells, "
        f"error {errors.median():.2%} in the median, {errors.max():.2%} at most."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    text, well = summary(folder)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
