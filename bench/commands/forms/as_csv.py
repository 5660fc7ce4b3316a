"""CSV: the records of an output; notes and paths of files go to standard error."""

from __future__ import annotations

import csv
from typing import TextIO

from spbench.bench.commands.output import Output


def show(output: Output, out: TextIO, err: TextIO) -> None:
    """Write the records under a line of column names; a value that is None or absent is empty."""
    table = csv.DictWriter(out, output.all_columns(), lineterminator="\n")
    table.writeheader()
    table.writerows(output.records)
    for line in (*output.notes, *output.files):
        print(line, file=err)
