"""Differences in groups, for people: those of a strategy's cells that changed in the same way are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spbench.bench.tools.changes.judgement import Difference
from spbench.bench.tools.changes.metrics import METRICS
from spbench.bench.units import three_digits

#: a part of a number that is written as percents
_PERCENT = "%"
#: by quantity; of others the values have no unit
_UNITS = {**{metric.name: metric.unit for metric in METRICS}, "error": _PERCENT}
_WORDS = {metric.name: metric.words for metric in METRICS}
#: by unit: larger or smaller ones, and how many of it they are
_SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    _PERCENT: ((0.01, _PERCENT),),
}


@dataclass(frozen=True)
class Group:
    """Differences of one verdict, strategy and quantity, in which the same moved; of those that are allowed,
    of all strategies.

    Attributes:
        differences: the worst first.
    """

    differences: Sequence[Difference]

    @property
    def worst(self) -> Difference:
        return self.differences[0]

    @property
    def verdict(self) -> str:
        return f"{self.worst.verdict} (allowed)" if self.worst.allowed else self.worst.verdict

    @property
    def strategy(self) -> str:
        names = list(dict.fromkeys(each.strategy for each in self.differences))
        return names[0] if len(names) == 1 else f"{len(names)} strategies"

    @property
    def quantity(self) -> str:
        return _WORDS.get(self.worst.quantity, self.worst.quantity)

    @property
    def values(self) -> str:
        """Base and new of the worst, in units for people; of what is missing or new, what there is."""
        worst, unit = self.worst, _UNITS.get(self.worst.quantity, "")
        if worst.verdict == "new":
            return shown(worst.new, unit)
        return (
            shown(worst.base, unit) if worst.verdict == "missing" else shown_pair(worst.base, worst.new, unit)
        )

    @property
    def where(self) -> str:
        """The worst cell or claim, and how many more there are."""
        more = len(self.differences) - 1
        return f"{self.worst.where}{f' and {more} more' if more else ''}"


def grouped(differences: Iterable[Difference]) -> list[Group]:
    """The differences in groups, in the order of the first of each."""
    groups: dict[tuple[object, ...], list[Difference]] = {}
    for each in differences:
        key = (each.verdict, each.allowed or each.strategy, each.quantity, each.moved)
        groups.setdefault(key, []).append(each)
    return [Group(members) for members in groups.values()]


def shown(value: object, unit: str) -> str:
    """A value as people read it; a word as it is, "none" for None."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "none" if value is None else str(value)
    return shown_pair(value, value, unit)


def shown_pair(base: object, new: object, unit: str) -> str:
    """Two values as people read them, with as many digits as tell them apart, such as "115.6 us ->
    116.4 us"; one of two that are equal."""
    numbers = [v for v in (base, new) if isinstance(v, (int, float)) and math.isfinite(v)]
    if len(numbers) < 2:
        return f"{shown(base, unit)} -> {shown(new, unit)}"
    largest = max(map(abs, numbers))
    scale, name = next((each for each in _SCALES.get(unit, ()) if largest >= each[0]), (1.0, unit))
    scale, name = (0.01, name) if unit == _PERCENT else (scale, name)
    for digits in range(3, 8):
        texts = [_plain(value, scale, digits) for value in numbers]
        if texts[0] != texts[1] or base == new:
            break
    else:
        name, texts = unit, [_plain(value, 1.0, 15) for value in numbers]
    pair = " -> ".join(f"{text} {name}".strip().replace(" %", "%") for text in dict.fromkeys(texts))
    return (
        f"{pair}{_part(numbers[1] / numbers[0] - 1)}"
        if base != new and numbers[0] and unit != _PERCENT
        else pair
    )


def _part(change: float) -> str:
    """A change in brackets, as percents; "" where these would be 0."""
    sign = "+" if change > 0 else "-"
    return f" ({sign}{three_digits(abs(change) * 100)}%)" if abs(change) >= 5e-6 else ""


def _plain(value: float, scale: float, digits: int) -> str:
    """A number in a unit that is so many of the value's own, with at least so many digits, thousands
    separated, and no exponent; whole ones of the value's own unit as they are."""
    if value == 0 or (scale == 1 and float(value).is_integer()):
        return f"{value:,.0f}"
    scaled = value / scale
    places = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:,.{places}f}"
