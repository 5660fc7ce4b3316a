"""What the scripts that measure on a GPU share: arguments, tables written line by line, texts of errors."""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

#: a function that adds a line to a table
Add = Callable[[Mapping[str, Any]], None]


def parser_of(
    about: str | None, seconds: float, devices: Sequence[str] = ("cuda", "cpu")
) -> argparse.ArgumentParser:
    """A parser of the shared arguments; ``about``: a script's docstring, ``seconds``: the default limit."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--device", choices=devices, default="cuda")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """The arguments of the command line, after the output folder was created; None, and a line on standard
    error, if there is no GPU but the script would measure on one (so without ``--predict``)."""
    asked = parser.parse_args()
    measures = asked.device == "cuda" and not vars(asked).get("predict")
    if measures and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return None
    asked.folder.mkdir(parents=True, exist_ok=True)
    return asked


@contextmanager
def table(path: Path, columns: Sequence[str]) -> Iterator[Add]:
    """Inside, a function that adds a line to a CSV file; each line is on disk at once."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()

        def add(line: Mapping[str, Any]) -> None:
            writer.writerow(line)
            file.flush()

        yield add


def in_a_line(error: Exception, most: int = 160) -> str:
    """An error's type and message in one line of at most ``most`` characters, for the column ``error``."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:most]
