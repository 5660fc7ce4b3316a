"""CSV: the records of an output; notes and paths of files go to standard error."""

from typing import TextIO

from spbench.bench.command_line.output import Output
from spbench.bench.files import csv_text


def show(output: Output, out: TextIO, err: TextIO) -> None:
    """Write the records below a line of column names; a value that is None or absent is left empty."""
    columns = list(output.columns or dict.fromkeys(name for record in output.records for name in record))
    out.write(csv_text(columns, output.records))
    for line in (*output.notes, *output.files):
        print(line, file=err)
