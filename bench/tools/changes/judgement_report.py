"""The gate's judgement as tables and notes: differences of a strategy's cells that changed in the same way
share one line."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import count
from typing import Any, NamedTuple

from spbench.bench.command_line.output import Output
from spbench.bench.row import finite
from spbench.bench.tools.changes.judgement import Judgement
from spbench.bench.tools.changes.metrics import METRICS, TABLES, Difference, Metric
from spbench.bench.units import LEAST_CHANGE, shown_pair, shown_value, six_digits
from spbench.plots.series import grouped as by_value

#: the metric of each quantity that has one
_METRICS = {metric.name: metric for metric in METRICS} | {"error": Metric("error", "%", "smaller")}


def grouped(differences: Iterable[Difference], *, each: bool = False) -> list[dict[str, Any]]:
    """The differences as records in groups of one verdict, strategy and quantity whose moved parts
    (:class:`Why`) have the same names; allowed differences of all strategies are in one group. Groups keep
    the order in which their first differences stand, which are the worst.

    Args:
        each: a group for each difference instead.
    """
    order = count()
    groups = by_value(
        differences,
        lambda d: (next(order) if each else d.verdict, d.allowed or d.strategy, d.quantity, d.moved),
    )
    return [_group(members) for members in groups.values()]


def _group(members: Sequence[Difference]) -> dict[str, Any]:
    worst, strategies = members[0], {member.strategy for member in members}
    metric = _METRICS.get(worst.quantity)
    unit = metric.unit if metric else ""
    values = shown_pair(worst.base, worst.new, unit)
    if worst.verdict in ("missing", "new"):
        values = shown_value(worst.new if worst.verdict == "new" else worst.base, unit)
    strategy = worst.strategy if len(strategies) == 1 else f"{len(strategies)} strategies"
    about = {"worst": worst, "differences": members, "strategy": strategy, "values": values}
    return TABLES.record("group", **about, quantity=metric.words if metric else worst.quantity)


class ShownDifference(NamedTuple):
    """The values of a difference as texts; a value that does not exist is ""."""

    base: str
    new: str
    change: str


def shown_difference(difference: Difference) -> ShownDifference:
    """The texts of a difference: its two values (whole numbers with all digits, others with six), and the
    change, as an amount if both values are whole numbers, and in percent of the base."""
    base, new = difference.base, difference.new
    words = []
    if all(isinstance(value, (int, float)) and math.isfinite(value) for value in (base, new)):
        part = new / base - 1 if base else math.inf
        words += [f"{new - base:+,.0f}"] * (float(base).is_integer() and float(new).is_integer())
        words += [f"{part:+.3%}"] * (math.isfinite(part) and abs(part) >= LEAST_CHANGE)
        if difference.interval and difference.p is not None:
            low, high = difference.interval
            words.append(f"worse by {low:+.1%} to {high:+.1%} (p {difference.p:.1g})")
    return ShownDifference(shown_number(base), shown_number(new), ", ".join(words))


def shown_number(value: Any) -> str:
    """The text of a value: a number with commas between thousands, a word as it is, "" for None."""
    if isinstance(value, (int, float)):
        return six_digits(value, ",")
    return "" if value is None else str(value)


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
    groups, each = grouped(differences), grouped(differences, each=True)
    tables = [
        TABLES.table("differences", of, lines, tested=tested)
        for of, lines in ((title, groups), ("Cell by cell", each))
    ]
    lines = [finite(asdict(difference)) for difference in differences]
    word = judgement.word if judgement.word == "not worse" else judgement.word.upper()
    return Output(
        tables[:1] if groups else [],
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
        details=tables[1:] if len(each) > len(groups) else [],
        code=1 if judgement.fails else 2 if judgement.judged_nothing else 0,
    )
