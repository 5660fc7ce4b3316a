"""The gate: are new results as good as the old ones?

Results are joined by cell key, published numbers by claim and cells. Worse is: a worse status, more sent
bytes, a formula no longer met, more peak or reserved memory or a longer step on virtual ranks, a smaller
answer of a search, a larger absolute error against what was published, and whatever is gone. Bytes and
answers are compared exactly, simulated times and errors to a tolerance; times and memory of real ranks differ
from run to run, so :mod:`bench.regressions.measured_change` judges them. Provenance, order, reasons and
elapsed times are not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spbench.bench.published.comparison import COMPARISON_FILE
from spbench.bench.regressions.measured_change import MeasuredChange, measured_changes
from spbench.bench.regressions.metrics import METRICS, Metric, readings
from spbench.bench.regressions.result_files import Results, read_results
from spbench.bench.regressions.statuses import STATUSES
from spbench.bench.sweep.results import Row

__all__ = ["Difference", "Judgement", "Results", "judge", "read_results"]

#: absolute, of relative errors
ERROR_TOLERANCE = 1e-6

Verdict = Literal["worse", "missing", "better", "new"]


@dataclass(frozen=True)
class Difference:
    """One number, status, cell or claim that is not what it was.

    Attributes:
        where: a cell's key, or a claim and its cells.
        base, new: before and now; None where there is none.
        change: how much of the base it is worse by (negative: better); infinite where that is no number.
        allowed: it is worse, but of what a subset need not have.
        interval: of ``change``, for a measured number that was tested.
        p: of that test, corrected for the number of tests.
    """

    verdict: Verdict
    where: str
    quantity: str
    base: Any
    new: Any
    change: float = math.inf
    allowed: bool = False
    interval: tuple[float, float] | None = None
    p: float | None = None

    @property
    def fails(self) -> bool:
        """Whether it closes the gate."""
        return self.verdict in ("worse", "missing") and not self.allowed


@dataclass(frozen=True)
class Judgement:
    """What a comparison of two results found.

    Attributes:
        differences: the worst first.
        equal: how many cells and claims are as they were, by kind.
        notes: what could not be judged.
    """

    differences: list[Difference]
    equal: Counter[str]
    notes: list[str]

    @property
    def fails(self) -> bool:
        return any(difference.fails for difference in self.differences)


def judge(base: Results, new: Results, *, subset: bool = False) -> Judgement:
    """Set new results beside old ones.

    Args:
        subset: the new results may lack cells, and the claims that stand on them.
    """
    found: list[Difference] = []
    equal: Counter[str] = Counter()
    notes = [*base.notes, *new.notes]
    measured, not_judged = measured_changes(base.cells, new.cells)
    for key in dict.fromkeys([*base.cells, *new.cells]):
        differences = list(_cell(key, base.cells.get(key), new.cells.get(key), subset))
        differences += [_measured(key, change) for change in measured.get(key, ())]
        found += differences
        equal["cells"] += not differences
    if base.claims is None and new.claims is None:
        pass
    elif base.claims is None or (new.claims is None and not new.path.is_dir()):
        side = base if base.claims is None else new
        notes.append(f"{side.path} has no {COMPARISON_FILE}: errors against published numbers are not judged")
    else:
        for name in dict.fromkeys([*base.claims, *(new.claims or {})]):
            before, now = base.claims.get(name), (new.claims or {}).get(name)
            # cells of both, as a claim that lost its cells does not name them any more
            keys = {row[side] for row in (before, now) if row for side in ("numerator", "denominator")}
            differences = list(_claim(name, before, now, subset and not keys - {""} <= new.cells.keys()))
            found += differences
            equal["claims"] += not differences
    order = ["worse", "missing", "better", "new"]
    found.sort(key=lambda d: (not d.fails, order.index(d.verdict), -d.change))
    return Judgement(found, equal, notes + not_judged)


def _cell(key: str, base: Row | None, new: Row | None, subset: bool) -> Iterator[Difference]:
    if base is None or new is None:
        status = (base or new or {}).get("status")
        if new is None:
            yield Difference("missing", key, "cell", status, None, allowed=subset)
        else:
            yield Difference("new", key, "cell", None, status)
        return
    if base["status"] != new["status"]:
        worse = STATUSES.index(new["status"]) > STATUSES.index(base["status"])
        verdict: Verdict = "worse" if worse else "better"
        yield Difference(verdict, key, "status", base["status"], new["status"])
        if new["status"] not in ("ok", "oom"):
            return
    before, now = _exact(base), _exact(new)
    for metric in METRICS:
        yield from _number(key, metric, before.get(metric.name), now.get(metric.name))


def _measured(key: str, found: MeasuredChange) -> Difference:
    return Difference(
        "worse" if found.change > 0 else "better",
        key,
        found.name,
        found.base,
        found.new,
        found.change,
        interval=found.interval,
        p=found.p,
    )


def _exact(row: Row) -> dict[str, float]:
    """What is judged of a cell."""
    return {
        name: reading.value
        for name, reading in readings(row).items()
        if reading.exact and reading.metric.judged
    }


def _number(key: str, metric: Metric, base: float | None, new: float | None) -> Iterator[Difference]:
    if base is None and new is None:
        return
    if base is None or new is None:
        # a search without an answer found that nothing fits; any other number is missing, or is new
        yield Difference("missing" if new is None else "new", key, metric.name, base, new)
        return
    if abs(new - base) > metric.tolerance * abs(base):
        excess = metric.excess(base, new)
        yield Difference("worse" if excess > 0 else "better", key, metric.name, base, new, excess)


def _claim(
    name: tuple[str, ...], base: Mapping[str, Any] | None, new: Mapping[str, Any] | None, allowed: bool
) -> Iterator[Difference]:
    """Judge one published number.

    Args:
        allowed: the new results need not have its cells.
    """
    where = " ".join(word for word in name[:2] if word)
    errors = [row["relative_error"] if row is not None else None for row in (base, new)]
    before, now = (None if error is None else abs(error) for error in errors)
    if base is None:
        yield Difference("new", where, "error", None, now)
        return
    if new is None:
        yield Difference("missing", where, "error", before, None, allowed=allowed)
        return
    right = [row["status_published"] == row["status_reproduced"] for row in (base, new)]
    if right[0] != right[1]:
        was, now_is = base["status_reproduced"], new["status_reproduced"]
        verdict: Verdict = "worse" if right[0] else "better"
        yield Difference(verdict, where, "published status", was, now_is, allowed=allowed)
    if before is None or now is None:
        if before is not None:
            yield Difference("missing", where, "error", before, None, allowed=allowed)
        elif now is not None:
            yield Difference("new", where, "error", None, now)
    elif abs(now - before) > ERROR_TOLERANCE:
        yield Difference("worse" if now > before else "better", where, "error", before, now, now - before)
