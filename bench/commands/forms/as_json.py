"""JSON: the content of a report; notes and paths of files go to standard error."""

from __future__ import annotations

import json
from typing import TextIO

from spbench.bench.commands.command_report import Report


def show(report: Report, out: TextIO, err: TextIO) -> None:
    """Write the content as one JSON value, indented by one space.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    print(json.dumps(report.content, indent=1, allow_nan=False), file=out)
    for line in (*report.notes, *report.files):
        print(line, file=err)
