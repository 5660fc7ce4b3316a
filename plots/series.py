"""Result rows sorted into the panels and lines of a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.plots.style import strategy_name

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """The rows of one line, by number of GPUs.

    Attributes:
        setting: what tells it from other lines of its strategy; empty, if there are none.
    """

    strategy: str
    setting: str
    rows: tuple[Row, ...]

    @property
    def label(self) -> str:
        """Its name in a legend."""
        return ", ".join(filter(None, (strategy_name(self.strategy), self.setting)))


def gpus(row: Row) -> int:
    """The number of GPUs of a row's cell."""
    return math.prod((row["cell"].get("sizes") or {}).values())


def gpu_counts(rows: Iterable[Row]) -> list[int]:
    """The different numbers of GPUs, ascending."""
    return sorted({gpus(row) for row in rows})


def by_model(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each model, models by name."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["cell"]["model"], []).append(row)
    return dict(sorted(models.items()))


def series_of(rows: Sequence[Row], order: Iterable[str], apart_from: Sequence[str] = ()) -> list[Series]:
    """The lines of a panel: one a strategy, or several where a strategy has several rows of one GPU count.

    Args:
        order: the strategies, in the order in which lines are wanted.
        apart_from: settings that do not make a line of their own.
    """
    found = []
    for strategy in order:
        mine = [row for row in rows if row["cell"]["strategy"] == strategy]
        names = _distinguishing(mine, apart_from)
        lines: dict[str, list[Row]] = {}
        for row in mine:
            has = _settings(row)
            lines.setdefault(", ".join(_setting(name, has.get(name)) for name in names), []).append(row)
        found += [Series(strategy, text, tuple(sorted(line, key=gpus))) for text, line in lines.items()]
    return found


def shared(rows: Iterable[Row], name: str) -> Any:
    """The value of a cell's field, if all rows have the same; else None."""
    values = {str(row["cell"].get(name)): row["cell"].get(name) for row in rows}
    return next(iter(values.values())) if len(values) == 1 else None


def title(rows: Sequence[Row], otherwise: str) -> str:
    """The title of the rows' scenario, if they name one, and the settings that all rows share."""
    named = next((row["scenario"] for row in rows if row.get("scenario")), None)
    scenario = named.get("title") if isinstance(named, Mapping) else named
    settings = [shared(rows, name) for name in ("cluster", "precision", "variant", "engine")]
    text = ", ".join(str(value) for value in settings if value)
    text += " engine" if settings[-1] else ""
    return f"{scenario or otherwise}{f' ({text})' if text else ''}"


def _distinguishing(rows: Sequence[Row], apart_from: Sequence[str]) -> list[str]:
    """The settings that differ, if some rows differ in nothing but settings."""
    settings = [
        {name: value for name, value in _settings(row).items() if name not in apart_from} for row in rows
    ]
    if len(gpu_counts(rows)) == len(rows):
        return []
    names = dict.fromkeys(name for has in settings for name in has)
    return [name for name in names if len({str(has.get(name)) for has in settings}) > 1]


def _settings(row: Row) -> dict[str, Any]:
    """The settings of a cell on one level, without the model, the strategy and the sizes it shards over."""
    cell = row["cell"]
    plain = ("variant", "cluster", "engine", "precision", "batch", "seq_len")
    settings = {name: cell.get(name) for name in plain}
    settings |= {axis: (cell.get("sizes") or {}).get(axis, 1) for axis in ("dp", "pp")}
    for group in ("model_options", "strategy_options", "training"):
        settings |= cell.get(group) or {}
    return settings


def _setting(name: str, value: Any) -> str:
    return str(value) if name in ("variant", "cluster", "engine", "precision") else f"{name} {value}"
