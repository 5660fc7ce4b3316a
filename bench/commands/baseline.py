"""Baselines: our own results, committed, for `spbench compare` to set new ones beside.

A baseline is a folder with cells.jsonl and comparison.csv as a run leaves them, of virtual ranks alone, in
the order of their keys, and without what differs from run to run (elapsed time, time stamp, provenance):
the same code writes the same bytes on any machine, and a diff shows what has changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spbench.bench.atomic_write import write_whole
from spbench.bench.commands import output as report
from spbench.bench.commands.run import run_cells
from spbench.bench.comparison import claims as compare
from spbench.bench.config.scenario import load_scenario
from spbench.bench.config.select import Narrowing
from spbench.bench.sweep.results import FILE, Row, finite

FOLDER = Path("results", "baseline")


def make_baselines(
    names: Sequence[str], variant: str | None, jobs: int | None, output: Path, resume: bool
) -> int:
    """Run scenarios on virtual ranks and write the baseline of each; returns the exit code.

    Args:
        output: gets a folder for each scenario.
        resume: go on with the rows in results/runs, whatever code made them, instead of running all again.

    Raises:
        UserError: a scenario is wrong, or a folder cannot be written.
    """
    scenarios = [load_scenario(name) for name in names]
    narrowing = Narrowing(engines=("virtual",), variant=variant)
    code = 0
    for scenario in scenarios:
        folder = Path("results", "runs", scenario.name)
        ran = run_cells(scenario, narrowing, folder, jobs, fresh=not resume)
        if ran is None:
            return 130
        if ran.failed():
            report.message(f"spbench: no baseline of {scenario.name} was written")
            code = 1
            continue
        for path in write_baseline(ran.rows, ran.comparisons, output / scenario.name):
            print(path)
    return code


def canonical(row: Row) -> Row:
    """A row without what differs from run to run."""
    kept = {key: row[key] for key in ("key", "cell", "status", "reason")}
    return {**kept, "measurement": {k: v for k, v in row["measurement"].items() if "samples" not in k}}


def write_baseline(
    rows: Sequence[Row], comparisons: Sequence[compare.Comparison], folder: Path
) -> list[Path]:
    """Write cells.jsonl, and comparison.csv if there is anything to compare; returns their paths.

    Raises:
        UserError: they cannot be written; earlier ones are as they were.
    """
    lines = [
        json.dumps(finite(canonical(row)), allow_nan=False, sort_keys=True, separators=(",", ":")) + "\n"
        for row in sorted(rows, key=lambda row: row["key"])
    ]
    path = write_whole(folder / FILE, "".join(lines))
    return [path, compare.write(comparisons, folder)] if comparisons else [path]
