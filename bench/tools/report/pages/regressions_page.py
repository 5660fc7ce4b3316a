"""The page of regressions: gates against their baselines, and the history of metrics over commits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spbench.bench.tools.changes.history import Assessment, History, counts
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.history_drawings import history_drawings, quiet_table
from spbench.bench.tools.report.page import DataTable, Page, Part
from spbench.bench.tools.report.report_markdown import (
    code,
    codes,
    dated,
    link,
    listed,
    markdown_table,
    marked,
    plain,
)
from spbench.bench.tools.report.what_changed import PAGE, Gate, assessed, gates

_COLUMNS = {"worse": "worse", "removed": "missing", "improved": "better", "new": "new", "unchanged": "equal"}


def pages(gathered: Gathered) -> Iterator[Page]:
    """regressions.html."""
    history, problem, assessments = assessed(gathered.history)
    all_gates = list(gates(gathered.baseline, gathered.results / "runs"))
    missing = (
        f"There is no baseline in {code(gathered.baseline)}; `spbench baseline --scenario gate` writes one."
    )
    yield Page(
        PAGE,
        "Regressions",
        "regressions.md",
        {
            "facts": listed(_facts(all_gates, history, assessments)),
            "gates": markdown_table(map(_gate_line, all_gates)) or missing,
            "differences": [*_differences(all_gates)],
            "history": _history(history, assessments) if history else _no_history(problem, gathered),
        },
        order=80,
        summary="What is worse than it was: results beside committed baselines, and metrics over commits.",
    )


def _facts(
    all_gates: Sequence[Gate], history: History | None, assessments: Sequence[Assessment]
) -> Iterator[str]:
    judged = [gate.judgement for gate in all_gates if gate.judgement is not None]
    worse = sum(judgement.fails for judgement in judged)
    if judged:
        text = _counted(worse, f"{worse} of {len(judged)}")
        yield f"{text} results are worse than their baselines; {len(all_gates)} baselines in all"
    else:
        yield f"{marked('unjudged', 'Not judged')}: no results of this code beside {len(all_gates)} baselines"
    if history:
        of = counts(assessments)
        commits = len({record.commit.hash for record in history.records})
        yield f"{_counted(of['standing'])} regressions of the history stand"
        yield f"{_counted(of['missed'])} targets missed"
        series = f"{len(assessments)} series over {commits} commits"
        yield f"**{of['steps']}** steps in {series}, {of['meant']} of them meant"


def _counted(bad: int, text: str = "") -> str:
    return marked("bad" if bad else "good", text or bad)


def _gate_line(gate: Gate) -> dict[str, Any]:
    """A baseline as a line of a table, in Markdown."""
    if gate.judgement:
        fails = gate.judgement.fails
        verdict = marked("bad" if fails else "good", "worse" if fails else "not worse")
    else:
        verdict = marked("unjudged", "not judged" if gate.was_run else "not run")
    machines, of_base = (plain("; ".join(some)) for some in reversed(gate.machines))
    return {
        "baseline": link(gate.scenario, f"#{gate.table_name}") if gate.lines else plain(gate.scenario),
        "verdict": verdict,
        **{head: str(gate.counts[of]) if gate.judgement else "" for head, of in _COLUMNS.items()},
        "base commit": codes(map(dated, gate.commits[0])) or "unknown",
        "head commit": codes(map(dated, gate.commits[1])) or ("unknown" if gate.judgement else ""),
        "machine": f"{machines}; of the baseline: {of_base}" if of_base else machines,
    }


def _differences(all_gates: Sequence[Gate]) -> Iterator[Part]:
    for gate in all_gates:
        if lines := gate.lines:
            caption = f"{gate.scenario}: what differs from the baseline, the worst first"
            yield DataTable(gate.table_name, caption, lines, sortable=len(lines) > 1)
        notes = gate.judgement.notes if gate.judgement else [gate.problem]
        yield listed(f"{code(gate.scenario)}: {plain(note)}" for note in notes)


def _no_history(problem: str, gathered: Gathered) -> str:
    folder = f"{gathered.results}/history"
    return f"""{plain(problem)} A history is a folder of records, one for each run of a suite:

    spbench run --scenario gate --output results/runs/gate
    spbench record results/runs/gate --history {folder}
    spbench report --output DIR --history {folder}
"""


def _history(history: History, assessments: Sequence[Assessment]) -> Iterator[Part]:
    branch, *others = history.branches
    machines = codes(sorted({record.machine_name for record in history.records})) or "unknown"
    yield f"""Branch {code(branch)}; machines: {machines}. A shaded range holds the commit of a step: of an
exact metric it lies between two neighbours, of a measured one it is as wide as noise makes it. Dashed lines
are targets. Point at a mark to see its commit. That a step was meant is said in
{code(f"{history.folder}/meant.yaml")}."""
    if others:
        yield f"Records of {plain(', '.join(others))} are left out."
    drawings: list[Part] = [*history_drawings(assessments)]
    yield from drawings or [marked("good", "No series has a step or a target.")]
    if table := quiet_table(assessments):
        yield "### Series without a step or a target {#unchanged}"
        yield table
        yield from history_drawings(assessments, quiet=True)
