"""The marks and notes of rows without a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.lines import Line2D

from spbench.plots.series import Row
from spbench.plots.style import INK

#: status -> (marker, filled, its name in legends); every other status without a number is a failure
_MARKS = {
    "oom": ("x", True, "out of memory"),
    "unsupported": ("s", False, "unsupported"),
}
_FAILURE = ("v", False, "failed")


def status_mark(status: str, color: str = INK) -> Line2D:
    """The mark of a row without a number, not yet placed."""
    marker, filled, name = _MARKS.get(status, _FAILURE)
    return marker_line(name, color, marker, "" if filled else "white", markersize=5.5, markeredgewidth=1.4)


def marker_line(name: str, color: str, marker: str = "o", face: str = "", **style: Any) -> Line2D:
    """A marker without a place, as legends have it; without a colour of its face it has that of its edge."""
    style |= {"color": color, "markerfacecolor": face or color}
    return Line2D([], [], linestyle="none", marker=marker, label=name, **style)


def lost_notes(named: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """A sentence for each named row that has no number, except those out of memory, with its reason."""
    for name, row in named:
        if row["status"] not in ("ok", "oom"):
            yield f"{name}: {row['status']}{reason_of(row)}"


def reason_of(row: Row) -> str:
    """The reason of a row's status in brackets, empty if it has none."""
    return f" ({row['reason']})" if row.get("reason") else ""
