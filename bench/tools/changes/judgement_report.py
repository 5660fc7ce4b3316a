"""The gate's judgement as tables and notes: differences of a strategy's cells that changed in the same way
share one line."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from spbench.bench.command_line.output import Output, Table
from spbench.bench.row import finite
from spbench.bench.tools.changes.judgement import Judgement
from spbench.bench.tools.changes.metrics import METRICS, TABLES, Difference
from spbench.bench.units import LEAST_CHANGE, shown_pair, shown_value, six_digits
from spbench.plots.series import grouped as by_value

#: the unit of each quantity; values of other quantities have none
_UNITS = {**{metric.name: metric.unit for metric in METRICS}, "error": "%"}
_WORDS = {metric.name: metric.words for metric in METRICS}


@dataclass(frozen=True)
class ChangeGroup:
    """Differences of one verdict, strategy and quantity whose moved parts (:class:`Why`) have the same names;
    allowed differences of all strategies are in one group.

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
        """The base and the new value of the worst difference, as text with units; only one of these values if
        the difference is "missing" or "new"."""
        worst, unit = self.worst, _UNITS.get(self.worst.quantity, "")
        if worst.verdict in ("missing", "new"):
            return shown_value(worst.new if worst.verdict == "new" else worst.base, unit)
        return shown_pair(worst.base, worst.new, unit)

    @property
    def certainty(self) -> str | None:
        """The interval and the corrected p-value of the worst difference as text; None if it has no test."""
        if self.worst.interval is None or self.worst.p is None:
            return None
        low, high = self.worst.interval
        return f"{low:+.1%} to {high:+.1%} ({self.worst.p:.1g})"

    @property
    def where(self) -> str:
        """The cell or claim of the worst difference, and the number of the group's other differences."""
        more = len(self.differences) - 1
        return f"{self.worst.where}{f' and {more} more' if more else ''}"


def grouped(differences: Iterable[Difference]) -> list[ChangeGroup]:
    """The differences in groups; groups keep the order in which their first differences stand."""
    groups = by_value(differences, lambda d: (d.verdict, d.allowed or d.strategy, d.quantity, d.moved))
    return [ChangeGroup(members) for members in groups.values()]


class ShownDifference(NamedTuple):
    """The values of a difference as texts; a value that does not exist is ""."""

    base: str
    new: str
    change: str


def shown_difference(difference: Difference) -> ShownDifference:
    """The texts of a difference: its two values (whole numbers with all digits, others with six), and the
    change, as an amount if both values are whole numbers, and in percent of the base."""
    base, new = difference.base, difference.new
    return ShownDifference(shown_number(base), shown_number(new), _change(difference))


def shown_number(value: Any) -> str:
    """The text of a value: a number with commas between thousands, a word as it is, "" for None."""
    if isinstance(value, (int, float)):
        return six_digits(value, ",")
    return "" if value is None else str(value)


def _change(difference: Difference) -> str:
    base, new = difference.base, difference.new
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (base, new)):
        return ""
    words = [f"{new - base:+,.0f}"] if float(base).is_integer() and float(new).is_integer() else []
    part = new / base - 1 if base else math.inf
    words += [f"{part:+.3%}"] if math.isfinite(part) and abs(part) >= LEAST_CHANGE else []
    if difference.interval and difference.p is not None:
        low, high = difference.interval
        words.append(f"worse by {low:+.1%} to {high:+.1%} (p {difference.p:.1g})")
    return ", ".join(words)


def judgement_report(
    judgement: Judgement, title: str, notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Output:
    """The output of `spbench compare`: a table of differences by strategy and moved parts, the worst first,
    and a summary; the exit code is 1 if a result is worse, 2 if nothing could be judged.

    Args:
        title: the title of the table.
        notes: lines that come before the judgement's notes.
        about: further entries of the output's JSON content.
    """
    differences = judgement.differences
    tested = any(difference.p is not None for difference in differences)

    def table(title: str, groups: Sequence[ChangeGroup]) -> Table:
        return TABLES.table("differences", title, groups, tested=tested)

    groups, each = grouped(differences), [ChangeGroup([difference]) for difference in differences]
    lines = [finite(asdict(difference)) for difference in differences]
    word = judgement.word if judgement.word == "not worse" else judgement.word.upper()
    return Output(
        [table(title, groups)] if groups else [],
        {
            **(about or {}),
            "fails": judgement.fails,
            "equal": judgement.equal,
            "unjudged": sorted(judgement.unjudged),
            "notes": judgement.notes,
            "differences": lines,
        },
        [{**line, "moved": "; ".join(line["moved"])} for line in lines],
        [field.name for field in fields(Difference)],
        notes=[*notes, *(f"note: {x}" for x in judgement.notes), f"{word}: {judgement.counted('equal')}"],
        details=[table("Cell by cell", each)] if len(each) > len(groups) else [],
        code=1 if judgement.fails else 2 if judgement.judged_nothing else 0,
    )
