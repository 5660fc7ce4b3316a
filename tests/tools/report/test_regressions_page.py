"""The page of regressions: what `spbench compare` finds, and what a history says of its series."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pytest

from spbench.bench.measurement import Measured
from spbench.bench.row import Row
from spbench.bench.tools.changes.history import read_history
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.records import Commit, RunRecord, add_record
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.report.changes_between import changes
from spbench.bench.tools.report.gates import gates
from spbench.bench.tools.report.gathered import Gathered
from spbench.bench.tools.report.history_charts import notable_charts, others_chart, places_of
from spbench.bench.tools.report.page import Chart, Page
from spbench.bench.tools.report.pages.regressions_page import pages
from spbench.bench.tools.report.rendering import Rendering, environment

Rows = list[dict[str, Any]]


def row(key: str, peak: int = 1000, status: str = "ok") -> dict[str, Any]:
    return {
        "key": key,
        "cell": {"engine": "virtual"},
        "status": status,
        "reason": "",
        "measurement": {
            "peak_memory_bytes": peak,
            "communication": [{"sent_bytes": 8}],
            "formula_difference": [],
        },
        "provenance": {"commit": "beef", "host": "here"},
    }


def write(folder: Path, rows: Rows) -> None:
    folder.mkdir(parents=True)
    (folder / "cells.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def page_of(results: Path, history: Path | None = None) -> tuple[Page, str]:
    (page,) = pages(Gathered(results, results / "baseline", history, [], []))
    return page, Rendering(environment(), page, []).html()


# -- gates -----------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One byte more, a status that is worse, a cell that is gone, a new one, and one that is better."""
    base = [row("same"), row("more"), row("worse"), row("gone"), row("better")]
    new = [row("same"), row("more", 1001), row("worse", status="oom"), row("new"), row("better", 900)]
    write(tmp_path / "baseline" / "gate", base)
    write(tmp_path / "runs" / "gate", new)
    write(tmp_path / "baseline" / "other", base)
    return tmp_path


def test_planted_changes_are_listed_the_worst_first(results: Path) -> None:
    gate, other = gates(results / "baseline", results / "runs")
    assert gate.judgement is not None
    assert gate.judgement.fails
    assert gate.counts == {"worse": 2, "missing": 1, "better": 1, "new": 1, "equal": 1}
    assert [(line["verdict"], line["where"], line["quantity"]) for line in gate.lines] == [
        ("worse", "worse", "status"),
        ("worse", "more", "peak_memory_bytes"),
        ("missing", "gone", "cell"),
        ("better", "better", "peak_memory_bytes"),
        ("new", "new", "cell"),
    ]
    assert gate.lines[1]["worse by (%)"] == pytest.approx(0.1)
    assert (gate.commits[1], gate.machines[1]) == (["beef"], ["here"])
    found = judge(read_results(results / "baseline" / "gate"), read_results(results / "runs" / "gate"))
    assert [d.where for d in found.differences] == [line["where"] for line in gate.lines]
    assert other.judgement is None
    assert "spbench run --scenario other" in other.problem


def test_a_closed_gate_is_red(results: Path) -> None:
    page, html = page_of(results)
    assert '<strong class="bad">1 of 1</strong>' in html
    assert '<strong class="bad">worse</strong>' in html
    cells = re.findall(r"<tr>\s*<th scope=\"row\"><a href=\"#gate-gate\">gate</a></th>(.*?)</tr>", html, re.S)
    assert re.findall(r'<td class="number">(\d+)</td>', cells[0]) == ["2", "1", "1", "1", "1"]
    assert [table.rows for table in page.values["tables"].values()] == [
        next(iter(gates(results / "baseline", results / "runs"))).lines
    ]


def test_an_open_gate_is_not(tmp_path: Path) -> None:
    write(tmp_path / "baseline" / "gate", [row("same")])
    write(tmp_path / "runs" / "gate", [row("same")])
    _, html = page_of(tmp_path)
    assert '<strong class="good">0 of 1</strong>' in html
    assert 'class="bad"' not in html


def test_nothing_is_green_that_was_not_run(results: Path) -> None:
    _, html = page_of(results)
    assert '<td colspan="6" class="unjudged">not run: nothing was run here' in html
    (results / "runs" / "gate" / "cells.jsonl").unlink()
    _, html = page_of(results)
    assert '<strong class="unjudged">not run</strong>' in html
    assert 'class="good"' not in html


def test_the_overview_counts_what_changed(results: Path) -> None:
    (found,) = changes(Gathered(results, results / "baseline", None, [], []))
    assert (found.worse, found.better, found.new, found.judged, found.standing) == (3, 1, 1, 6, None)
    assert found.worst[0] == ("worse: status", "regressions.html#gate-gate")
    assert found.against == "1 of 2 baselines"
    (results / "runs" / "gate" / "cells.jsonl").unlink()
    (found,) = changes(Gathered(results, results / "baseline", None, [], []))
    assert (found.judged, found.problem) == (0, "nothing was run beside the baselines")


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    _, html = page_of(tmp_path / "results")
    assert "spbench baseline --scenario gate" in html
    assert "spbench record results/runs/gate --history" in html
    (tmp_path / "history").mkdir()
    _, html = page_of(tmp_path / "results", tmp_path / "history")
    assert "has no records of runs" in html


def test_a_spoilt_file_closes_nothing_else(results: Path) -> None:
    (results / "runs" / "gate" / "cells.jsonl").write_text("{")
    _, html = page_of(results)
    assert "not a result row" in html


# -- history ---------------------------------------------------------------------------------------------

COMMITS = 60


def recorded(folder: Path, values: Callable[[int], dict[str, float]]) -> Path:
    """A history of 60 commits, with the peak memory in bytes of cells."""
    for number in range(COMMITS):
        commit = Commit(
            f"{number + 1:040x}"[::-1], f"2026-01-{1 + number // 24:02}T{number % 24:02}:00:00+00:00", "main"
        )
        provenance = {"host": "here", "torch": "2", "machine": {"os": "Linux"}}
        cells = [
            Row(
                key=key,
                cell={"engine": "virtual"},
                status="ok",
                provenance=provenance,
                measurement=Measured(peak_memory_bytes=value),
            )
            for key, value in values(number).items()
        ]
        add_record(RunRecord("gate", commit.date, commit, cells), folder)
    return folder


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression at commit 33, an improvement that was meant at 20, and a target that is missed."""
    folder = recorded(
        tmp_path_factory.mktemp("history"),
        lambda n: {
            "same": 100,
            "worse": 105 if n >= 33 else 100,
            "better": 90 if n >= 20 else 100,
            "big": 900,
        },
    )
    meant = read_history(folder).records[20].commit.short
    (folder / "targets.yaml").write_text("targets: [{cell: big, metric: peak_memory_bytes, value: 800}]\n")
    (folder / "meant.yaml").write_text(f"meant: [{{commit: '{meant}', reason: smaller moments}}]\n")
    return folder


def charts_of(folder: Path) -> tuple[list[Chart], Chart | None, dict[str, int]]:
    found = read_history(folder)
    assessments = [found.assess(series) for series in found.series()]
    return list(notable_charts(assessments)), others_chart(assessments), places_of(assessments)


def values_of(spec: Any, mark: str) -> Sequence[dict[str, Any]]:
    """The data of the first layer that has this mark."""
    return next(layer["data"]["values"] for layer in spec["layer"] if (layer["mark"]["type"]) == mark)


def test_series_with_steps_or_targets_are_drawn_and_others_folded(history: Path) -> None:
    (chart,), others, _ = charts_of(history)
    assert [panel.title for panel in chart.panels] == ["big", "worse", "better"]
    assert others is not None
    folded = {(line["metric"], line["series"]) for line in others.table.rows}
    assert ("peak_memory_bytes", "same") in folded
    assert ("peak_memory_bytes", "worse") not in folded
    # of what never changes two points are kept
    kept = [value for value in others.spec["data"]["values"] if value["metric"] == "peak_memory_bytes"]
    assert [value["place"] for value in kept] == [0, COMMITS - 1]


def test_a_step_is_marked_between_its_commits(history: Path) -> None:
    (chart,), _, places = charts_of(history)
    big, worse, better = (panel.spec for panel in chart.panels)
    (step,) = values_of(worse, "rect")
    assert (step["from"], step["to"], step["kind"], step["change"]) == (32, 33, "regression", "+5%")
    hashes = [found[:12] for found in places]
    assert step["commits"] == f"{hashes[32]}..{hashes[33]}"
    (step,) = values_of(better, "rect")
    assert (step["kind"], step["meant"], step["to"]) == ("meant", "smaller moments", 20)
    assert [each["value"] for each in values_of(worse, "line")] == [100] * 33 + [105] * 27
    assert values_of(big, "rule") == [{"value": 800, "target": "800"}]
    lines = {line["cell"]: line for line in chart.table.rows}
    assert lines["big"]["target"] == "800 is missed"
    assert (lines["worse"]["step"], lines["worse"]["before"], lines["worse"]["after"]) == (
        *("regression, stands", "100", "105"),
    )


def test_specifications_are_vega_lite(history: Path) -> None:
    charts, others, _ = charts_of(history)
    assert others is not None
    for spec in [others.spec, *(panel.spec for chart in charts for panel in chart.panels)]:
        alt.Chart.from_dict(dict(spec))


def test_the_overview_says_what_came_with_the_newest_commit(tmp_path: Path) -> None:
    def values(last: int) -> Callable[[int], dict[str, float]]:
        return lambda n: {"a": 105 if n >= last else 100, "b": 90 if n >= last else 100, "c": 100}

    newest = recorded(tmp_path / "newest", values(COMMITS - 1))
    _, found = changes(Gathered(tmp_path, tmp_path, newest, [], []))
    assert re.fullmatch("commit [0-9a-f]{7} of 2026-01-03", found.since)
    assert (found.worse, found.better, found.new) == (1, 1, 0)
    assert found.worst == [("a: peak_memory_bytes", "regressions.html#history")]
    assert (found.standing, found.judged) == (1, 6)
    # an older regression stands, but is no news
    older = recorded(tmp_path / "older", values(30))
    _, found = changes(Gathered(tmp_path, tmp_path, older, [], []))
    assert (found.worse, found.better, found.standing) == (0, 0, 1)


def test_the_page_counts_what_stands(history: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    _, html = page_of(tmp_path / "results", history)
    facts = re.findall(r"<li><strong[^>]*>([^<]*)</strong> <span>([^<]*)</span>", html)
    assert ("1", "regressions in the history that stand") in facts
    assert ("1", "targets missed") in facts
    assert ("2", "steps in 8 series over 60 commits, 1 of them meant") in facts
