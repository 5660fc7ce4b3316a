"""Which cells of a table make a line, and what the lines are drawn along.

No table says how it wants to be drawn: of all ways to draw cells along GPUs, sequence length or batch, with a
panel for each value of some other settings and a line for each method, the one with the fewest lines is
taken in which a line has one cell at each place.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from spbench.plots.series import settings

#: what lines may be drawn along, and its name
ALONG = {"gpus": "GPUs", "seq_len": "sequence length (tokens)", "batch": "batch (sequences)"}
#: derived: what weak scalings have in common
TOKENS_PER_GPU = "tokens_per_gpu"
_MOST_FIELDS = 3

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Arrangement:
    """How cells are drawn.

    Attributes:
        along: a key of :data:`ALONG`; None: no lines, each cell has a place of its own.
        panels: settings of whose values each combination has a panel.
    """

    along: str | None
    panels: tuple[str, ...]


def point_of(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell on one level, hashable, with ``model``, ``method``, ``gpus`` and
    ``tokens_per_gpu``; None where the cell has no such setting."""
    gpus = math.prod((cell.get("sizes") or {}).values())
    batch, length = cell.get("batch"), cell.get("seq_len")
    found = {
        "model": cell["model"],
        "method": cell["strategy"],
        "gpus": gpus,
        "seq_len": length,
        "batch": batch,
        TOKENS_PER_GPU: batch * length / gpus if batch and length else None,
        **settings({"cell": cell}),
    }
    return {name: value if isinstance(value, Hashable) else str(value) for name, value in found.items()}


def varying(points: Sequence[Point]) -> list[str]:
    """The settings that differ between points, in the order of the first one's."""
    names = dict.fromkeys(name for point in points for name in point)
    return [name for name in names if len({point.get(name) for point in points}) > 1]


def arranged(points: Sequence[Point]) -> Arrangement:
    """The arrangement with the fewest lines, then the fewest panels; without lines if lines were of one or
    two cells."""
    names = [name for name in varying(points) if name != "method"]
    best = min(_possible(points, names), default=None)
    if best is None or len(points) < 2 * best[0]:
        return Arrangement(None, tuple(name for name in names if name == "model"))
    return best[-1][1]


def _possible(points: Sequence[Point], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """(lines, panels, fields, place among the candidates), and the arrangement, for each that works."""
    number = 0
    for along in (name for name in ALONG if name in names):
        if any(point[along] is None for point in points):
            continue
        others = [name for name in names if name != along]
        for size in range(_MOST_FIELDS + 1):
            for fields in combinations(others, size):
                lines = _distinct(points, (*fields, "method"))
                if _distinct(points, (*fields, "method", along)) == len(points):
                    number += 1
                    panels = _distinct(points, fields)
                    yield lines, panels, size, (number, Arrangement(along, fields))


def _distinct(points: Iterable[Point], names: Sequence[str]) -> int:
    return len({tuple(point.get(name) for name in names) for point in points})
