"""The marks and notes of rows without a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=marker,
        markersize=5.5,
        markeredgewidth=1.4,
        markeredgecolor=color,
        markerfacecolor=color if filled else "white",
        label=name,
    )


def legend_marker(name: str, color: str, marker: str = "o", face: str = "") -> Line2D:
    """The entry of a marker in a legend; without a colour of its face it has that of its edge."""
    return Line2D(
        [], [], linestyle="none", marker=marker, color=color, markerfacecolor=face or color, label=name
    )


def lost_notes(named: Iterable[tuple[str, Row]]) -> Iterator[str]:
    """A sentence for each named row that has no number, except those out of memory, with its reason."""
    for name, row in named:
        if row["status"] not in ("ok", "oom"):
            yield f"{name}: {row['status']}{reason_of(row)}"


def reason_of(row: Row) -> str:
    """The reason of a row's status in brackets, empty if it has none."""
    return f" ({row['reason']})" if row.get("reason") else ""
