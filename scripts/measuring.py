"""What the scripts that measure on a GPU share: arguments, tables that are written line by line, errors."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

#: adds a line to a table
Add = Callable[[Mapping[str, Any]], None]


def parser_of(
    about: str | None, seconds: float, devices: Sequence[str] = ("cuda", "cpu")
) -> argparse.ArgumentParser:
    """The arguments that all have; ``about``: the script's docstring, ``seconds``: the default limit."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--device", choices=devices, default="cuda")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace | None:
    """The arguments, with the folder made; None, and a line that says so: there is no GPU, and something is
    to be measured on it (not with ``--predict``)."""
    asked = parser.parse_args()
    measures = asked.device == "cuda" and not vars(asked).get("predict")
    if measures and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        return None
    asked.folder.mkdir(parents=True, exist_ok=True)
    return asked


@contextmanager
def table(path: Path, columns: Sequence[str]) -> Iterator[Add]:
    """What adds a line to a CSV file, which is on disk at once."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()

        def add(line: Mapping[str, Any]) -> None:
            writer.writerow(line)
            file.flush()

        yield add


def in_a_line(error: Exception, most: int = 160) -> str:
    """What went wrong, as the column ``error`` has it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:most]
