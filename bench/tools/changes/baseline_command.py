"""Baselines: our own committed results, with which `spbench compare` compares new results.

A baseline is a folder with the cells.jsonl and comparison.csv of a run on virtual ranks. Its rows are sorted
by key and lack the fields that differ from run to run (elapsed time, time stamp, provenance). So the same
code writes the same bytes on any machine, and a diff shows what has changed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from spbench.bench import measure
from spbench.bench.command_line import progress
from spbench.bench.command_line.options import WORDS, executor, jobs, many, path_option, printed, variant
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.scenario_run import run_cells
from spbench.bench.files import write_whole
from spbench.bench.measure import RESULTS_FILE, beginning_server
from spbench.bench.measured_code import refuse_unmeasured_checkout
from spbench.bench.row import Row, json_line
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.comparison import write as write_comparisons

FOLDER = Path("results", "baseline")


@click.command("baseline")
@many("--scenario", WORDS, "Baselines of these scenarios.")
@variant
@jobs
@executor
@path_option("--output", "Folder of the baselines; default results/baseline.", folder=True)
@click.option("--resume", is_flag=True, help="Keep the rows in results/runs that are up to date.")
@printed
def command(
    scenario: tuple[str, ...],
    variant: str | None,
    jobs: int | None,
    executor: str | None,
    output: Path | None,
    resume: bool,
) -> Iterator[Output]:
    """Run scenarios again, and write their results as baselines.

    They run on virtual ranks. `spbench compare` compares later results with a baseline.
    """
    if not scenario:
        raise click.UsageError("name at least one --scenario")
    refuse_unmeasured_checkout(Path.cwd(), "a baseline")
    with beginning_server():
        from spbench.bench.tools.papers.answer import load_scenario, set_beside

    narrowing = measure.Narrowing(engines=("virtual",), variant=variant)
    for loaded in [load_scenario(name) for name in scenario]:
        folder = Path("results", "runs", loaded.name)
        with measure.executor_at(executor) as there:
            ran = run_cells(loaded, narrowing, folder, jobs, fresh=not resume, executor=there)
        if ran.failed():
            progress.message(f"spbench: no baseline of {loaded.name} was written")
            yield Output(code=1)
        else:
            files = write_baseline(ran.rows, set_beside(loaded, ran)[0], (output or FOLDER) / loaded.name)
            names = [str(path) for path in files]
            yield Output(content={"files": names}, records=[{"file": name} for name in names], files=files)


def canonical(row: Row) -> dict[str, Any]:
    """A row without the fields that differ from run to run: elapsed time, time stamp, provenance, samples."""
    kept = {key: row[key] for key in ("key", "cell", "status", "reason")}
    return {**kept, "measurement": {k: v for k, v in row["measurement"].items() if "samples" not in k}}


def write_baseline(rows: Sequence[Row], comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Write cells.jsonl, and comparison.csv if there are comparisons; return the paths of these files.

    Raises:
        UserError: the files cannot be written; earlier files stay as they were.
    """
    in_order = sorted(rows, key=lambda row: row["key"])
    lines = (json_line(canonical(row), sort_keys=True) for row in in_order)
    path = write_whole(folder / RESULTS_FILE, "".join(lines))
    return [path, write_comparisons(comparisons, folder)] if comparisons else [path]
