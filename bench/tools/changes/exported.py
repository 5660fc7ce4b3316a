"""What an export is asked for, and what it makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.results import Row
from spbench.bench.tools.changes.history import Target
from spbench.bench.tools.changes.metrics import Reading
from spbench.bench.tools.changes.suite import Suite


class ExportedValue(NamedTuple):
    """A number to be exported, and where it stands."""

    suite: Suite
    row: Row
    reading: Reading

    @property
    def number(self) -> float:
        """The value, as :func:`whole` writes it."""
        return whole(self.reading.value)


def whole(value: float) -> float:
    """The value, as an int where it is a whole number: JSON then has all digits and no exponent."""
    return int(value) if float(value).is_integer() else value


@dataclass(frozen=True)
class ExportRequest:
    """What is to be exported.

    Attributes:
        suites: at least one; their names differ.
        output: the file or folder that will be written; None for standard output.
        targets: values that metrics have to meet.
        not_run: names of what there are bases of, but no results.
        heeded: "targets", once an export has asked for one.
    """

    suites: Sequence[Suite]
    output: Path | None = None
    targets: Sequence[Target] = ()
    not_run: Sequence[str] = ()
    heeded: set[str] = field(default_factory=set)

    def values(self, *metrics: str) -> list[ExportedValue]:
        """The numbers of these metrics, or of all, by suite and row.

        Raises:
            UserError: there is none; with what there is instead.
        """
        values = [value for suite in self.suites for value in _of(suite, metrics)]
        if not values:
            raise UserError(f"nothing to export: {'; '.join(self.left_out(*metrics))}")
        return values

    def target(self, value: ExportedValue) -> float | None:
        """What the number has to meet: the first target that names it; None if none does."""
        self.heeded.add("targets")
        suite, row, reading = value
        machine = "" if reading.exact else suite.origin(row).host
        place = (suite.name, row["key"], reading.metric.name, machine)
        return next((target.value for target in self.targets if target.names(*place)), None)

    def left_out(self, *metrics: str) -> list[str]:
        """A line for each suite with cells that have none of these metrics, or no metric at all."""
        what = " or ".join(metrics) or "value"
        lines = []
        for suite in self.suites:
            has = {value.row["key"] for value in _of(suite, metrics)}
            left = Counter(row["status"] for row in suite.rows if row["key"] not in has)
            if left:
                counts = ", ".join(f"{count} {status}" for status, count in left.items())
                lines.append(f"{suite.name}: left out {left.total()} cells without a {what}: {counts}")
        return lines


def _of(suite: Suite, metrics: Sequence[str]) -> list[ExportedValue]:
    """The numbers of a suite of these metrics, or of all."""
    values = (ExportedValue(suite, *each) for each in suite.values())
    return [value for value in values if not metrics or value.reading.metric.name in metrics]


@dataclass(frozen=True)
class Exported:
    """An export as text.

    Attributes:
        content: of the one file; or, by path within the folder of the output, of several, in the order in
            which they take their names.
        notes: what was left out and why, one a line.
    """

    content: str | Mapping[str, str]
    notes: Sequence[str] = ()
