"""CSV: the records of a report; notes and paths of files go to standard error."""

from __future__ import annotations

import csv
from typing import TextIO

from spbench.bench.commands.command_report import Report


def show(report: Report, out: TextIO, err: TextIO) -> None:
    """Write the records under a line of column names; a value that is None or absent is empty."""
    table = csv.DictWriter(out, report.all_columns(), lineterminator="\n")
    table.writeheader()
    table.writerows(report.records)
    for line in (*report.notes, *report.files):
        print(line, file=err)
