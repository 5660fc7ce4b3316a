"""Whether published numbers reproduce: yes, in part or no, by one rule for a table and for a paper.

A number is met where ours is within :data:`TOLERANCE` of it (a formula: equal at every cell), a published out
of memory where ours is too. "Yes" is all met, "no" fewer than half; numbers that a rate was fitted to are not
judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.paper_findings import distinct
from spbench.bench.units import percent

#: of absolute relative errors
TOLERANCE = 0.1
_EXACT = 1e-9
#: roles of numbers that prove something where they are met
JUDGED = ("predicted", "inferred", "formula")

Word = Literal["yes", "in part", "no", "not run"]


@dataclass(frozen=True)
class PaperVerdict:
    """What became of some published numbers.

    Attributes:
        judged, met: how many numbers and statuses.
        errors: absolute relative errors of the numbers that are no formulas.
        formula_errors: those of closed forms at their cells.
    """

    judged: int
    met: int
    errors: Sequence[float]
    formula_errors: Sequence[float] = ()

    @property
    def word(self) -> Word:
        if not self.judged:
            return "not run"
        if self.met == self.judged:
            return "yes"
        return "no" if 2 * self.met < self.judged else "in part"

    @property
    def median(self) -> float | None:
        return median(self.errors) if self.errors else None

    @property
    def worst(self) -> float | None:
        return max(self.errors, default=None)


def verdict_on(records: Sequence[Comparison]) -> PaperVerdict:
    """The verdict on records of findings, each published number and run counted once, by its first record."""
    judged = (r for r in distinct(records) if r.role in JUDGED)
    numbers = [r for r in judged if r.reproduced is not None or r.status_reproduced]
    records = [record for record in records if record.role in JUDGED]
    met = [*(_is_met(record, records) for record in numbers), *_statuses(records)]
    return PaperVerdict(
        len(met),
        sum(met),
        _errors(record for record in numbers if record.role != "formula"),
        _errors(record for record in records if record.role == "formula"),
    )


def _errors(records: Iterable[Comparison]) -> list[float]:
    return [abs(record.relative_error) for record in records if record.relative_error is not None]


def _is_met(record: Comparison, records: Sequence[Comparison]) -> bool:
    if record.role == "formula":
        # one number that is evaluated at many cells
        same = [r for r in records if r.role == "formula" and r.source == record.source]
        return all(r.published == r.reproduced or _is_within(r, _EXACT) for r in same)
    return _is_within(record, TOLERANCE)


def _is_within(record: Comparison, tolerance: float) -> bool:
    return record.relative_error is not None and abs(record.relative_error) <= tolerance


def _statuses(records: Sequence[Comparison]) -> Iterable[bool]:
    """Whether ours ran out of memory too, for each run that is published as that and was run here."""
    runs: dict[str, bool] = {}
    for record in records:
        if record.status_published == "oom" and record.status_reproduced:
            runs.setdefault(record.published_run, record.status_reproduced == "oom")
    return runs.values()


def counts(verdict: PaperVerdict) -> str:
    """The numbers of a verdict in words."""
    if not verdict.judged:
        return "nothing was judged"
    text = f"{verdict.met} of {verdict.judged} numbers met"
    if verdict.median is not None:
        text += f", median error {percent(verdict.median)}, worst {percent(verdict.worst, 0)}"
    if (worst := max(verdict.formula_errors, default=0.0)) > _EXACT:
        text += f"{'; closed forms' if verdict.errors else ', closed forms'} off by up to {percent(worst, 0)}"
    return text
