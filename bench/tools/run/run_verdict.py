"""What came of a run, in a line or a few: how many cells have which status, which are not ok, and how far the
published numbers are away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from spbench.bench.measure.sweep.results import FAULTS, Row
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.paper_findings import errors_by_role

#: cells of a status that are named
_NAMED = 3


def verdict(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> list[str]:
    """The lines, the counts of the statuses last."""
    return [*_errors(comparisons), *_not_ok(rows), _counts(rows)]


def _counts(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    cells = f"{len(rows)} cell{'' if len(rows) == 1 else 's'}"
    return f"{cells}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}"


def _not_ok(rows: Sequence[Row]) -> Iterator[str]:
    """The cells that failed or do not fit; those that are unsupported are counted alone."""
    for status in (*FAULTS, "oom"):
        named = list(dict.fromkeys(_name(row) for row in rows if row["status"] == status))
        if named:
            more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
            yield f"{status}: {'; '.join(named[:_NAMED])}{more}"


def _name(row: Row) -> str:
    """Model, strategy and mesh of a row's cell, with which its key begins."""
    return " ".join(row["key"].split("/")[:3])


def _errors(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """How far ours are from published numbers; our own closed forms, as sent_bytes, are none."""
    entries = [vars(entry) for entry in comparisons if entry.quantity != "sent_bytes"]
    if entries:
        yield f"published numbers: {errors_by_role(entries)}"
