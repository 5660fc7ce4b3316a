"""`spbench record`: keep the results of a run in a history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output
from spbench.bench.tools.changes.records import add_record, record_of


@click.command("record")
@click.argument("results", type=click.Path(path_type=Path))
@path_option("--history", "Folder; created if need be.", required=True)
@click.option("--suite", help="Name of the suite; that of the results' folder if left out.")
@click.option(
    "--machine",
    metavar="NAME",
    help="Name of the machine, where jobs run on hosts that come and go; the host's if left out. Timings are "
    "held against timings of the same name and hardware.",
)
@click.option("--commit", help="Commit that was measured; the one that the results name if left out.")
@path_option(
    "--repository",
    "Repository that has the commit; that around the working folder or the results if left out.",
)
@click.option("--branch", help="Branch that was measured; the one that is checked out if left out.")
@printed
def command(results: Path, history: Path, **naming: Any) -> Output:
    """Keep RESULTS as a file in a history.

    Commit and machine are kept too. RESULTS is a folder with cells.jsonl, such as results/runs/gate, or a
    file of pytest-benchmark. Results of changed files or several commits are refused. Recording the same run
    again changes nothing.
    """
    record = record_of(results, **naming)
    path, is_new = add_record(record, history)
    about = {
        "suite": record.suite,
        "commit": record.commit.hash,
        "date": record.commit.date,
        "branch": record.commit.branch,
        "machine": record.machine_name,
        "cells": len(record.rows),
        "recorded": is_new,
    }
    what = f"{len(record.rows)} cells of {record.suite} at {record.commit.short} ({record.commit.branch})"
    note = f"{what} on {record.machine_name}: {'recorded' if is_new else 'were recorded already'}"
    return Output(content={**about, "file": str(path)}, records=[about], notes=[note], files=[path])
