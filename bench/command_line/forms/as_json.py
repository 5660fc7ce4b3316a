"""JSON: the content of an output; notes and paths of files go to standard error."""

import json
from typing import TextIO

from spbench.bench.command_line.output import Output


def show(output: Output, out: TextIO, err: TextIO) -> None:
    """Write the content as one JSON value, indented by one space.

    Raises:
        ValueError: a number is infinite or not a number.
    """
    print(json.dumps(output.content, indent=1, allow_nan=False), file=out)
    for line in (*output.notes, *output.files):
        print(line, file=err)
