"""Lines of one value by number of GPUs, one a strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from spbench.plots.series import Row, Series, gpus
from spbench.plots.style import Look

LINESTYLES = ("-", "--", ":", "-.")

#: what a row has of the value that is drawn; None: nothing
Value = Callable[[Row], float | None]


def measured(field: str, unit: float = 1) -> Value:
    """A number of the measurement, of rows that ran through."""

    def value(row: Row) -> float | None:
        found = row["measurement"].get(field) if row["status"] == "ok" else None
        return None if found is None else found / unit

    return value


def draw_values(
    ax: Axes, series: Sequence[Series], look: dict[str, Look], value: Value, name: str, **style: Any
) -> list[Line2D]:
    """Draw the value of each line, with the id ``name`` and the line's label; settings of a strategy differ
    in how lines are dashed. Returns the lines, in the order of the series.

    Args:
        style: of all lines, where it should not be the usual one.
    """
    dashes: dict[str, str] = {}
    drawn = []
    for line in series:
        known = [(gpus(row), found) for row in line.rows if (found := value(row)) is not None]
        usual: dict[str, Any] = {
            "color": look[line.strategy].color,
            "marker": look[line.strategy].marker,
            "linestyle": dashes.setdefault(line.setting, LINESTYLES[len(dashes) % len(LINESTYLES)]),
            "label": line.label,
            "zorder": 3,
        }
        drawn += ax.plot(
            [count for count, _ in known],
            [found for _, found in known],
            gid=f"{name} {line.label}",
            **(usual | style),
        )
    return drawn


def highest(rows: Sequence[Row], value: Value) -> float:
    """The largest value of the rows; 0 if none has one."""
    return max((found for row in rows if (found := value(row)) is not None), default=0.0)


def without(series: Sequence[Series], value: Value) -> list[tuple[Series, list[Row]]]:
    """Of each line the rows that did not run through and have no value."""
    return [
        (line, [row for row in line.rows if row["status"] != "ok" and value(row) is None]) for line in series
    ]
