"""Lines of rows and the quantities that are drawn along them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spbench.plots.along import Along
from spbench.plots.series import Row, grouped, strategy
from spbench.plots.style import Look, strategy_name

_DASHES = ("--", ":", "-.")

#: a row's value of a quantity, None if it has none
Value = Callable[[Row], float | None]


def measured(field: str, unit: float = 1) -> Value:
    """The values of a field of the measurement, in units of ``unit``; None for rows that are not ok."""

    def value(row: Row) -> float | None:
        found = row["measurement"].get(field) if row["status"] == "ok" else None
        return None if found is None else found / unit

    return value


@dataclass(frozen=True)
class PlottedQuantity:
    """What a y axis shows.

    Attributes:
        column: the quantity's name in a comparison table and in the ids of what is drawn.
        logarithmic: for values that grow with the x axis, so that relative errors can be seen everywhere.
    """

    column: str
    axis_label: str
    value: Value
    logarithmic: bool = False


@dataclass(frozen=True)
class Line:
    """Rows along the x axis that are drawn as one line; ``name`` is its entry in the legend."""

    name: str
    look: Look
    rows: tuple[Row, ...]
    linestyle: str = "-"


def lines_of(
    rows: Sequence[Row], look: Mapping[str, Look], along: Along, setting: Callable[[Row], str] = lambda _: ""
) -> Iterator[Line]:
    """A line for each strategy, in the order of ``look``, or several dashed ones by their settings.

    Args:
        setting: what distinguishes a row from others of its strategy; empty where nothing does.
    """
    rows_of = grouped(rows, strategy)
    for name, its_look in look.items():
        for index, (text, some) in enumerate(grouped(rows_of.get(name, []), setting).items()):
            label = ", ".join(filter(None, (strategy_name(name), text)))
            dashes = _DASHES[index % len(_DASHES)] if text else "-"
            yield Line(label, its_look, tuple(sorted(some, key=along.at)), dashes)
