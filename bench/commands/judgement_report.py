"""What the gate says, as a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from spbench.bench.commands.output import Output, Table

if TYPE_CHECKING:
    from spbench.bench.regressions.judgement import Difference, Judgement


def judgement_report(
    judgement: Judgement, title: str, notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Output:
    """A table of the differences, the worst first, and a summary; the exit code is 1 if the gate is closed, 2
    if nothing could be judged.

    Args:
        title: of the table.
        notes: lines that come first.
        about: further entries of the report's content.
    """
    from spbench.bench.regressions.judgement import Difference
    from spbench.bench.sweep.results import finite

    lines = [finite(asdict(difference)) for difference in judgement.differences]
    tested = any(difference.p is not None for difference in judgement.differences)
    shown = [_line(difference, tested) for difference in judgement.differences]
    return Output(
        [Table(title, shown)] if shown else [],
        {
            **(about or {}),
            "fails": judgement.fails,
            "equal": judgement.equal,
            "unjudged": sorted(judgement.unjudged),
            "notes": judgement.notes,
            "differences": lines,
        },
        lines,
        [field.name for field in fields(Difference)],
        notes=[*notes, *(f"note: {note}" for note in judgement.notes), _summary(judgement)],
        code=1 if judgement.fails else 2 if judgement.judged_nothing else 0,
    )


def _line(difference: Difference, tested: bool) -> dict[str, Any]:
    """Of the table; ``tested``: it has a column for what is known of measured numbers."""
    shown = {
        side: f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else value
        for side, value in (("base", difference.base), ("new", difference.new))
    }
    return {
        "": f"{difference.verdict} (allowed)" if difference.allowed else difference.verdict,
        "quantity": difference.quantity,
        **shown,
        "worse by": f"{difference.change:+.3%}" if math.isfinite(difference.change) else None,
        **({"99% interval (p)": _certainty(difference)} if tested else {}),
        "where": difference.where,
    }


def _certainty(difference: Difference) -> str | None:
    """The interval and the corrected p-value of a measured number; None for others."""
    if difference.interval is None or difference.p is None:
        return None
    low, high = difference.interval
    return f"{low:+.1%} to {high:+.1%} ({difference.p:.1g})"


def _summary(judgement: Judgement) -> str:
    word = judgement.word if judgement.word == "not worse" else judgement.word.upper()
    return f"{word}: {judgement.counted('equal')}"
