"""What the gate says, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from spbench.bench.command_line.output import Output, Table

if TYPE_CHECKING:
    from spbench.bench.tools.changes.grouped import Group
    from spbench.bench.tools.changes.judgement import Difference, Judgement

#: columns of the table of groups, in the order in which a terminal gives them room
_IMPORTANT = ("", "strategy", "quantity", "base -> new", "cells")


def judgement_report(
    judgement: Judgement, title: str, notes: Sequence[str] = (), about: Mapping[str, Any] | None = None
) -> Output:
    """A table of what differs, by strategy and by what moved, the worst first, and a summary; the exit code
    is 1 if the gate is closed, 2 if nothing could be judged.

    Args:
        title: of the table.
        notes: lines that come first.
        about: further entries of the report's content.
    """
    from spbench.bench.measure.sweep.results import finite
    from spbench.bench.tools.changes.grouped import Group, grouped
    from spbench.bench.tools.changes.judgement import Difference

    lines = [finite(asdict(difference)) for difference in judgement.differences]
    tested = any(difference.p is not None for difference in judgement.differences)
    groups = grouped(judgement.differences)
    shown = [_line(group, tested) for group in groups]
    each = [_line(Group([difference]), tested) for difference in judgement.differences]
    return Output(
        [_table(title, shown)] if shown else [],
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
        notes=[*notes, *(f"note: {note}" for note in judgement.notes), _summary(judgement)],
        details=[_table("Cell by cell", each)] if len(each) > len(groups) else [],
        code=1 if judgement.fails else 2 if judgement.judged_nothing else 0,
    )


def _table(title: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    return Table(title, lines, important=_IMPORTANT, below=("what moved", "where"))


def _line(group: Group, tested: bool) -> dict[str, Any]:
    """Of the table; ``tested``: it has a column for what is known of measured numbers."""
    return {
        "": group.verdict,
        "strategy": group.strategy,
        "cells": len(group.differences),
        "quantity": group.quantity,
        "base -> new": group.values,
        **({"99% interval (p)": _certainty(group.worst)} if tested else {}),
        "what moved": group.worst.why,
        "where": group.where,
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
