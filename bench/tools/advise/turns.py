"""Where the best layout turns into another one, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from spbench.bench.errors import UserError

#: what can vary from answer to answer: the field, and how it is called
AXES = {"seq_len": "length", "gpus": "GPUs", "figures": "figure"}
NOTHING = "nothing fits"

Point = Mapping[str, Any]


def varying(points: Sequence[Point]) -> list[str]:
    """The fields in which answers differ, the one that is walked along first.

    Raises:
        UserError: there are more than two, which no map has.
    """
    names = [name for name in AXES if len({point[name] for point in points}) > 1]
    if len(names) > 2:
        raise UserError("give several --gpus, several --seq-len or a range of a figure: two of these at most")
    return names


def turns(points: Sequence[Point]) -> Iterator[str]:
    """A line for each value of what varies second: which strategy wins from where on, and where it is a tie.

    Args:
        points: with ``gpus``, ``seq_len``, ``figures``, ``strategy`` ("" where nothing fits) and ``tie``, in
            the order that they were asked in.
    """
    names = varying(points)
    if not names:
        return
    along, others = names[0], names[1:]
    for value in dict.fromkeys(tuple(point[name] for name in others) for point in points):
        row = [point for point in points if tuple(point[name] for name in others) == value]
        head = "".join(f"{shown(name, n)}: " for name, n in zip(others, value, strict=True))
        runs = [[*run] for _, run in groupby(row, lambda point: str(point["strategy"]))]
        winners = [f"{run[0]['strategy'] or NOTHING} {_where(along, run, run is runs[-1])}" for run in runs]
        ties = ", ".join(shown(along, point[along]) for point in row if point["tie"])
        yield head + ", ".join(winners) + (f"; a tie with another strategy at {ties}" if ties else "")


def _where(along: str, run: Sequence[Point], last: bool) -> str:
    first = shown(along, run[0][along])
    if last and len(run) > 1:
        return f"from {first} on"
    return f"at {first}" if len(run) == 1 else f"from {first} to {shown(along, run[-1][along])}"


def shown(name: str, value: Any) -> str:
    """A value of one of :data:`AXES` as people write it."""
    if name == "figures":
        return str(value) or "as it is"
    text = next((f"{value // n}{s}" for s, n in (("M", 2**20), ("K", 2**10)) if value % n == 0), str(value))
    return text if name == "seq_len" else f"{value} GPUs"
