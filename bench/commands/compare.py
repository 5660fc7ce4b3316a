"""`spbench compare`: the gate. Are new results as good as the old ones?"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.commands.command_report import Report, Table
from spbench.bench.commands.options import reported

if TYPE_CHECKING:
    from spbench.bench.comparison.regressions import Difference, Judgement


@click.command("compare")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--subset", is_flag=True, help="NEW may lack cells of BASE, and claims that stand on them.")
@reported
def command(base: Path, new: Path, subset: bool) -> Report:
    """Say whether the results NEW are worse than BASE; exit code 1 if they are.

    Each is a folder with cells.jsonl and comparison.csv, or a cells.jsonl. Sent bytes, memory and simulated
    times of virtual ranks, answers of searches, statuses and errors against published numbers are judged;
    times of real ranks are not.
    """
    from spbench.bench.comparison.regressions import Difference, judge, read_results
    from spbench.bench.sweep.results import finite

    judgement = judge(read_results(base), read_results(new), subset=subset)
    lines = [finite(asdict(difference)) for difference in judgement.differences]
    measured = any(difference.p is not None for difference in judgement.differences)
    shown = [_line(difference, measured) for difference in judgement.differences]
    return Report(
        [Table(f"{new} against {base}", shown)] if shown else [],
        {
            "fails": judgement.fails,
            "equal": judgement.equal,
            "notes": judgement.notes,
            "differences": lines,
        },
        lines,
        [field.name for field in fields(Difference)],
        notes=[*(f"note: {note}" for note in judgement.notes), _summary(judgement)],
        code=int(judgement.fails),
    )


def _line(difference: Difference, measured: bool) -> dict[str, Any]:
    """Of the table; ``measured``: it has a column for what is known of measured numbers."""
    shown = {
        side: f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else value
        for side, value in (("base", difference.base), ("new", difference.new))
    }
    return {
        "": f"{difference.verdict} (allowed)" if difference.allowed else difference.verdict,
        "quantity": difference.quantity,
        **shown,
        "worse by": f"{difference.change:+.3%}" if math.isfinite(difference.change) else None,
        **({"known to (p)": _certainty(difference)} if measured else {}),
        "where": difference.where,
    }


def _certainty(difference: Difference) -> str | None:
    """The interval and the corrected p-value of a measured number; None for others."""
    if difference.interval is None or difference.p is None:
        return None
    low, high = difference.interval
    return f"{low:+.1%} to {high:+.1%} ({difference.p:.1g})"


def _summary(judgement: Judgement) -> str:
    counts = Counter(difference.verdict for difference in judgement.differences)
    found = [f"{counts[v]} {v}" for v in ("worse", "missing", "better", "new") if counts[v]]
    equal = [f"{count} {kind} equal" for kind, count in judgement.equal.items()]
    return f"{'WORSE' if judgement.fails else 'not worse'}: {', '.join([*found, *equal])}"
