"""The page of regressions: gates against their baselines, and the history of metrics over commits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.history import counts, read_history
from spbench.bench.tools.report.gates import Gate, gates
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.history_charts import notable_charts, others_chart
from spbench.bench.tools.report.page import DataTable, Page


def pages(gathered: Gathered) -> Iterator[Page]:
    """regressions.html."""
    all_gates = list(gates(gathered.baseline, gathered.results / "runs"))
    tables = {gate.scenario: _differences(gate) for gate in all_gates if gate.lines}
    yield Page(
        "regressions.html",
        "Regressions",
        "regressions.html",
        {
            "gates": all_gates,
            "tables": tables,
            "results": str(gathered.results),
            "judged": [gate for gate in all_gates if gate.judgement is not None],
            "worse": [gate for gate in all_gates if gate.judgement is not None and gate.judgement.fails],
            **_history(gathered),
        },
        order=80,
        summary="What is worse than it was: results beside committed baselines, and metrics over commits.",
    )


def _differences(gate: Gate) -> DataTable:
    return DataTable(
        gate.table_name,
        f"{gate.scenario}: what differs from the baseline, the worst first",
        gate.lines,
        sortable=len(gate.lines) > 1,
    )


def _history(gathered: Gathered) -> dict[str, Any]:
    """The part of the history; without one, why."""
    empty: dict[str, Any] = {"history": None, "problem": "", "charts": [], "others": None}
    if gathered.history is None:
        return empty
    try:
        history = read_history(gathered.history)
        assessments = [history.assess(series) for series in history.series()]
    except UserError as error:
        return empty | {"problem": str(error)}
    branch, *others = history.branches
    return {
        "history": history,
        "problem": "",
        "branch": branch,
        "commits": len({record.commit.hash for record in history.records}),
        "machines": sorted({record.machine_name for record in history.records}),
        "series": len(assessments),
        "counts": counts(assessments),
        "charts": list(notable_charts(assessments)),
        "others": others_chart(assessments),
        "warnings": [f"records of {', '.join(others)} are left out"] if others else [],
    }
