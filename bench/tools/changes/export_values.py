"""Differences and origins in words and digits for people."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from spbench.bench.measure.sweep.results import Row
from spbench.bench.measure.trust.bands import shown_band, with_band
from spbench.bench.tools.changes.judgement import Difference
from spbench.bench.tools.changes.metrics import Reading, has_exact_engine
from spbench.bench.tools.changes.result_files import Results
from spbench.bench.tools.changes.suite import origin_of
from spbench.bench.units import three_digits


class ShownDifference(NamedTuple):
    """The values of a difference; "" where there is none."""

    base: str
    new: str
    change: str


def shown_difference(difference: Difference) -> ShownDifference:
    """The values with all digits of whole numbers and six of others, and by how much they differ: in units,
    where these are whole, and as a part of the base."""
    base, new = difference.base, difference.new
    return ShownDifference(shown_number(base), shown_number(new), _change(difference))


def shown_number(value: Any) -> str:
    """A number with thousands separated, or a word; "" for None."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"
    return "" if value is None else str(value)


def shown_reading(row: Row, reading: Reading) -> str:
    """A value that stands alone: a step time with its interval, rates with three digits, all of whole
    numbers."""
    if reading.metric.name == "step_time_s":
        return shown_band(with_band(row)["measurement"])
    return three_digits(reading.value) if reading.unit.endswith("/s") else shown_number(reading.value)


def _change(difference: Difference) -> str:
    base, new = difference.base, difference.new
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (base, new)):
        return ""
    whole = float(base).is_integer() and float(new).is_integer()
    words = [f"{new - base:+,.0f}"] if whole else []
    part = new / base - 1 if base else math.inf
    words += [f"{part:+.3%}"] if math.isfinite(part) and abs(part) >= 5e-6 else []
    if difference.interval and difference.p is not None:
        low, high = difference.interval
        words.append(f"worse by {low:+.1%} to {high:+.1%} (p {difference.p:.1g})")
    return ", ".join(words)


def shown_origin(results: Results, commit: str = "") -> str:
    """The commits, machines and versions of torch of results, such as "0123456789ab, torch 2.13.0, any
    machine".

    Numbers of engines that are exact are the same on any machine.

    Args:
        commit: of all rows, in place of what they say.
    """
    rows = results.cells.values()
    origins = [origin_of(row, results.path, commit) for row in rows]
    commits = dict.fromkeys(origin.shown_commit for origin in origins)
    torch = dict.fromkeys(
        f"torch {origin.versions['torch']}" for origin in origins if "torch" in origin.versions
    )
    machines = dict.fromkeys(
        "any machine" if has_exact_engine(row) else origin.host or "unknown machine"
        for row, origin in zip(rows, origins, strict=True)
    )
    return ", ".join(" and ".join(words) for words in (commits, torch, machines) if words)
