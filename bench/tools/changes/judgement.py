"""The gate: are new results as good as the old ones?

Rows are joined by cell key, claims (published numbers and ours) by name and cells. A result is worse if its
status is worse, its ranks send more bytes, its bytes no longer equal the closed form, its peak or reserved
memory or its step on virtual ranks grows, the answer of its search shrinks, its absolute error against the
published number grows, a number is not finite, or a cell, claim or number is missing. Bytes and answers are
compared exactly, simulated times and errors to a tolerance. Times and memory of real ranks differ from run to
run, so :mod:`tools.changes.change_evidence` judges them. Provenance, order, reasons and elapsed times are not
judged.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measured_code import code_digest, is_baseline, refuse_unmeasured_checkout
from spbench.bench.row import Row
from spbench.bench.tools.changes.change_evidence import measured_changes, why
from spbench.bench.tools.changes.metrics import (
    METRICS,
    STATUSES,
    VERDICTS,
    Difference,
    Verdict,
    readings,
    verdict_of_change,
)
from spbench.bench.tools.changes.result_files import Results, read_results
from spbench.bench.tools.papers.comparison import COMPARISON_FILE

#: a row of comparison.csv
Claim = Mapping[str, Any]

#: metrics of a search that are judged even if its answer has changed
OF_ANY_ANSWER = ("formula_differences", "answer")
#: the absolute tolerance of relative errors against published numbers
ERROR_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Judgement:
    """The outcome of a comparison of two results.

    Attributes:
        differences: the worst first.
        equal: the numbers of cells and of claims that did not change, by "cells" and "claims".
        unjudged: cells and claims without a difference, but with a number that could not be judged.
        notes: lines that say which numbers could not be judged, and why.
    """

    differences: list[Difference]
    equal: Counter[str]
    unjudged: Set[str]
    notes: list[str]

    @property
    def fails(self) -> bool:
        return any(difference.fails for difference in self.differences)

    @property
    def judged_nothing(self) -> bool:
        """Whether no cell and no claim could be compared, so that "not worse" would be meaningless."""
        return not self.equal.total() and all(each.verdict == "new" for each in self.differences)

    @property
    def word(self) -> str:
        """The verdict in a word or two: "worse", "not judged" or "not worse"."""
        return "worse" if self.fails else "not judged" if self.judged_nothing else "not worse"

    def counted(self, equal: str) -> str:
        """A text that counts the differences by verdict, the unchanged cells and claims (followed by the word
        ``equal``), and those that could not be judged in full: "1 worse, 12 cells equal"."""
        counts = Counter[str](difference.verdict for difference in self.differences)
        words = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        words += [f"{count} {kind} {equal}" for kind, count in self.equal.items()]
        words += [f"{len(self.unjudged)} not judged in full"] * bool(self.unjudged)
        return ", ".join(words)


def judge(base: Results, new: Results, *, subset: bool = False) -> Judgement:
    """Compare new results with old ones.

    Args:
        new: the new results; if read from a file, then by ``read_results(path, judged=True)``.
        subset: the new results may lack cells, and claims on these cells.

    Raises:
        UserError: a row of the base is ok and has no measurement.
    """
    _check_base(base)
    differences: list[Difference] = []
    equal: Counter[str] = Counter()
    measured, unjudged, not_judged = measured_changes(base.cells, new.cells)
    for key in dict.fromkeys([*base.cells, *new.cells]):
        before, now = base.cells.get(key), new.cells.get(key)
        of_cell = [
            *_not_finite(key, before, new.not_finite.get(key, ())),
            *_cell(key, before, now, subset),
            *measured.get(key, ()),
        ]
        differences += (_explained(each, before, now) for each in of_cell)
        equal["cells"] += not of_cell and key not in unjudged
    lost = {d.where for d in differences if d.quantity == "status" and d.fails}
    notes = [*base.notes, *new.notes, *_lacking(base, new)]
    for name in dict.fromkeys([*(base.claims or {}), *(new.claims or {})]):
        where = " ".join(word for word in name[:2] if word)
        if base.claims is None or (new.claims is None and not new.path.is_dir()):
            unjudged |= {where}
            continue
        was, is_now = base.claims.get(name), (new.claims or {}).get(name)
        # the cells that either side names, because a claim that lost its cells does not name them any more
        keys = {row[side] for row in (was, is_now) if row for side in ("numerator", "denominator")}
        of_claim = list(_claim(where, was, is_now, subset and not keys - {""} <= new.cells.keys()))
        # a claim on a cell that has no number any more needs no line, because the cell's status has one
        told = keys & lost
        differences += (
            _explained_claim(each, was, is_now)
            for each in of_claim
            if not (told and each.verdict == "missing" and each.quantity == "error")
        )
        equal["claims"] += not of_claim
    if (base.claims is None) != (new.claims is None) and (base.claims is None or not new.path.is_dir()):
        side = base if base.claims is None else new
        notes.append(f"{side.path} has no {COMPARISON_FILE}: errors against published numbers are not judged")
    differences.sort(key=lambda d: (not d.fails, VERDICTS.index(d.verdict), -d.change))
    return Judgement(
        differences, equal, unjudged - {each.where for each in differences}, [*notes, *not_judged]
    )


def _check_base(base: Results) -> None:
    """Refuse a base with a row that is ok but has no numbers, because no result is worse than such a row."""
    for key, row in base.cells.items():
        if row["status"] == "ok" and not row["measurement"]:
            raise UserError(
                f"{base.path}: the row {key} is ok and its measurement is empty, so that nothing can be "
                "judged by it; take the row from another copy, or make the base anew"
            )


def _lacking(base: Results, new: Results) -> Iterator[str]:
    """At most one line, on the metrics that only the new rows have though the cell's status is the same: a
    metric that the base lacks is not judged."""
    lacking: Counter[str] = Counter()
    for key in base.cells.keys() & new.cells.keys():
        before, now = base.cells[key], new.cells[key]
        if before["status"] == now["status"]:
            had = readings(before)
            lacking.update(n for n, r in readings(now).items() if r.metric.judged and n not in had)
    if lacking:
        named = ", ".join(f"{name} ({count} cell{'s' * (count > 1)})" for name, count in lacking.items())
        yield f"{base.path} lacks metrics that the new results have, so that they are not judged: {named}"


def _explained(difference: Difference, base: Row | None, new: Row | None) -> Difference:
    """The difference, with its cell's strategy and the reason why the values differ added."""
    either = new or base
    strategy = str(either["cell"].get("strategy", "")) if either else ""
    moved, text = why(difference.quantity, base, new) if base and new else ((), "")
    return replace(difference, strategy=strategy, moved=moved, why=text)


def _explained_claim(difference: Difference, base: Claim | None, new: Claim | None) -> Difference:
    """The difference, with its cell's strategy and the published number and ours added."""
    text = ""
    if base and new and new["published"] is not None:
        ours = ("none" if row["reproduced"] is None else f"{row['reproduced']:.6g}" for row in (base, new))
        text = f"published {new['published']:.6g}, ours {' -> '.join(ours)}"
    return replace(difference, strategy=str((new or base or {}).get("strategy") or ""), why=text)


def _not_finite(key: str, base: Row | None, fields: Sequence[str]) -> Iterator[Difference]:
    """A difference "worse" for each of ``fields``, which name numbers of a new row that are not finite."""
    before = base["measurement"] if base else {}
    for name in (field.removeprefix("measurement.") for field in fields):
        yield Difference("worse", key, name, before.get(name), math.nan)


def _cell(key: str, base: Row | None, new: Row | None, subset: bool) -> Iterator[Difference]:
    if base is None or new is None:
        was, is_now = (row["status"] if row else None for row in (base, new))
        yield from _numbers(key, "cell", was, is_now, allowed=subset)
        return
    if base["status"] != new["status"]:
        change = STATUSES.index(new["status"]) - STATUSES.index(base["status"])
        yield Difference(verdict_of_change(change), key, "status", base["status"], new["status"])
        if new["status"] not in ("ok", "oom"):
            return
    before, now = (
        {name: read.value for name, read in readings(row).items() if read.exact and read.metric.judged}
        for row in (base, new)
    )
    # a search with another answer measured another batch or length, so that its other numbers differ
    same_answer = before.get("answer") == now.get("answer")
    for metric in METRICS if same_answer else [m for m in METRICS if m.name in OF_ANY_ANSWER]:
        was, is_now = before.get(metric.name), now.get(metric.name)
        # a search without an answer says that nothing fits; any other number is missing, or is new
        excess = 0.0 if was is None or is_now is None else metric.excess(was, is_now)
        yield from _numbers(key, metric.name, was, is_now, excess, metric.tolerance * abs(was or 0))


def _numbers(
    where: str,
    quantity: str,
    base: Any,
    new: Any,
    excess: float = 0.0,
    tolerance: float = 0.0,
    *,
    allowed: bool = False,
) -> Iterator[Difference]:
    """At most one difference of two numbers, None where there is no number: one is missing or new, or they
    differ by more than the absolute ``tolerance``, never by NaN.

    Args:
        excess: how much worse the new number is.
        allowed: a number may be missing.
    """
    if base is None or new is None:
        if base is not new:
            verdict: Verdict = "missing" if new is None else "new"
            yield Difference(verdict, where, quantity, base, new, allowed=allowed and new is None)
    elif abs(new - base) > tolerance:
        yield Difference(verdict_of_change(excess), where, quantity, base, new, excess)


def _claim(where: str, base: Claim | None, new: Claim | None, allowed: bool) -> Iterator[Difference]:
    """The differences of one claim, a published number and ours; ``allowed``: the new results may lack it."""
    before, now = (
        None if row is None or row["relative_error"] is None else abs(row["relative_error"])
        for row in (base, new)
    )
    if base is None or new is None:
        verdict: Verdict = "new" if base is None else "missing"
        yield Difference(verdict, where, "error", before, now, allowed=allowed and new is None)
        return
    right = [row["status_published"] == row["status_reproduced"] for row in (base, new)]
    if right[0] != right[1]:
        statuses = base["status_reproduced"], new["status_reproduced"]
        verdict = verdict_of_change(right[0] - right[1])
        yield Difference(verdict, where, "published status", *statuses, allowed=allowed)
    if now is not None and not math.isfinite(now):
        yield Difference("worse", where, "error", before, math.nan)
    else:
        excess = (now or 0.0) - (before or 0.0)
        yield from _numbers(where, "error", before, now, excess, ERROR_TOLERANCE, allowed=allowed)


def check_gate(base: Results, new: Results) -> None:
    """Refuse to judge rows of other code, if the base is a committed baseline of the checkout of spbench
    around the working folder. Rows that do not name their code are accepted.

    Raises:
        UserError: spbench is imported from another tree than this checkout, or rows name other code.
    """
    if not is_baseline(base.path, Path.cwd()):
        return
    refuse_unmeasured_checkout(Path.cwd(), "the gate")
    digests = [(row.get("digest") or {}).get("code") for row in new.cells.values()]
    if others := sum(digest not in (None, code_digest()) for digest in digests):
        raise UserError(
            f"{new.path}: {others} of {len(digests)} rows come from other code than this checkout has "
            "now; run the scenario again, so that the gate judges this code"
        )


@dataclass(frozen=True)
class Suite(Results):
    """Results, with the base that they are compared with.

    Attributes:
        base: older results to compare with; None: there are none.
        previous_base: the base as it was before the change that made the results; None if not known.
    """

    base: Results | None = None
    previous_base: Results | None = None

    @cached_property
    def judgement(self) -> Judgement | None:
        """The gate's judgement of these results against their base; None without a base."""
        return judge(self.base, self) if self.base else None

    @cached_property
    def meant(self) -> Judgement | None:
        """How the base differs from the base before the change; None if one of them is not known."""
        return judge(self.previous_base, self.base) if self.previous_base and self.base else None


def read_suite(path: Path, base: Path | None = None, commit: str = "") -> Suite:
    """Read the results at ``path``, and their base at ``base`` if there is one.

    Args:
        commit: the commit of all rows of the results, whatever the rows say; "": each row says its own.

    Raises:
        UserError: results or base cannot be read, or the gate does not judge them (:func:`check_gate`).
    """
    before = read_results(base) if base else None
    results = Suite(**vars(read_results(path, judged=base is not None, commit=commit)), base=before)
    if before:
        check_gate(before, results)
    return results
