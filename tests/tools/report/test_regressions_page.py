"""The page of regressions: what `spbench compare` finds, and what a history says of its series. What the
site is made of.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.history import Assessment, read_history
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import joined
from spbench.bench.tools.report.drawings import history_figure
from spbench.bench.tools.report.gathered import Gathered, gather
from spbench.bench.tools.report.pages import papers_page, regressions_page
from tests.tools.changes.records import Cell, cell, commit, nightly
from tests.tools.changes.rows import folder as write
from tests.tools.changes.rows import raw
from tests.tools.report.conftest import ROOT

Rows = list[dict[str, Any]]


def row(key: str, peak: int = 1000, status: str = "ok") -> dict[str, Any]:
    sent = {"communication": [{"sent_bytes": 8}], "formula_difference": []}
    made_by = {"commit": "beef", "host": "here"}
    return raw(key, status=status, measurement={"peak_memory_bytes": peak, **sent}, provenance=made_by)


def page_of(results: Path, history: Path | None = None) -> str:
    (page,) = regressions_page.pages(Gathered(results, results / "baseline", history, [], []))
    return str(page.rendered()[page.path])


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
    gate, other = regressions_page.gates(results / "baseline", results / "runs")
    assert gate.judgement is not None
    assert gate.table is not None
    assert gate.judgement.fails
    assert dict(gate.counts) == {"worse": 2, "missing": 1, "better": 1, "new": 1, "equal": 1}
    assert [(line["verdict"], line["where"], line["quantity"]) for line in gate.table.rows] == [
        ("worse", "worse", "status"),
        ("worse", "more", "peak_memory_bytes"),
        ("missing", "gone", "cell"),
        ("better", "better", "peak_memory_bytes"),
        ("new", "new", "cell"),
    ]
    assert gate.table.rows[1]["worse by (%)"] == pytest.approx(0.1)
    assert (gate.commits[1], gate.machines[1]) == (["beef"], ["here"])
    found = judge(read_results(results / "baseline" / "gate"), read_results(results / "runs" / "gate"))
    assert [d.where for d in found.differences] == [line["where"] for line in gate.table.rows]
    assert other.judgement is None
    assert "spbench run --scenario other" in other.problem


def test_a_closed_gate_is_red(results: Path) -> None:
    html = page_of(results)
    assert '<strong class="bad">1 of 1</strong>' in html
    assert '<strong class="bad">worse</strong>' in html
    cells = re.findall(r'<tr>\s*<td><a href="#gate-gate">gate</a></td>(.*?)</tr>', html, re.S)
    assert re.findall(r"<td>(\d+)</td>", cells[0]) == ["2", "1", "1", "1", "1"]
    assert html.count("peak_memory_bytes") == 2
    assert 'id="gate-gate"' in html


def test_an_open_gate_is_not(tmp_path: Path) -> None:
    write(tmp_path / "baseline" / "gate", [row("same")])
    write(tmp_path / "runs" / "gate", [row("same")])
    html = page_of(tmp_path)
    assert '<strong class="good">0 of 1</strong>' in html
    assert 'class="bad"' not in html


def test_nothing_is_green_that_was_not_run(results: Path) -> None:
    html = page_of(results)
    assert '<td><strong class="unjudged">not run</strong></td>' in html
    assert "<code>other</code>: no results here; make them by spbench run --scenario other" in html
    (results / "runs" / "gate" / "cells.jsonl").unlink()
    html = page_of(results)
    assert '<strong class="unjudged">not run</strong>' in html
    assert 'class="good"' not in html


def test_the_overview_counts_what_changed(results: Path) -> None:
    gathered = Gathered(results, results / "baseline", None, [], [])
    (change,) = regressions_page.changes(gathered)
    counts = {name: change.counts[name] for name in ("worse", "better", "new", "judged")}
    assert (counts, change.against) == ({"worse": 3, "better": 1, "new": 1, "judged": 6}, "1 of 2 baselines")
    assert change.worst[0] == ("worse: status", "regressions.html#gate-gate")
    (results / "runs" / "gate" / "cells.jsonl").unlink()
    (change,) = regressions_page.changes(gathered)
    assert (change.word, change.problem) == (
        "Not run",
        "no run to compare with the baselines (0 of 2 baselines)",
    )
    (results / "runs" / "gate" / "cells.jsonl").write_text("{")  # which its own page says too
    (change,) = regressions_page.changes(gathered)
    assert change.word == "Not judged"
    assert "not a result row" in change.problem


def test_the_overview_says_what_changed(results: Path) -> None:
    (page,) = papers_page.pages(Gathered(results, results / "baseline", None, [], []))
    html = str(page.rendered()["index.html"])
    judged = 'of 6 <a href="regressions.html#gates">judged</a>: 1 of 2 baselines.'
    worst = '<a href="regressions.html#gate-gate">worse: status</a>;'
    assert f'<strong class="bad">3 worse</strong>, 1 better, 1 new {judged} {worst}' in html


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    html = page_of(tmp_path / "results")
    assert "spbench baseline --scenario gate" in html
    assert "spbench record results/runs/gate --history" in html
    (tmp_path / "history").mkdir()
    html = page_of(tmp_path / "results", tmp_path / "history")
    assert "has no records of runs" in html


def test_a_spoilt_file_closes_nothing_else(results: Path) -> None:
    (results / "runs" / "gate" / "cells.jsonl").write_text("{")
    html = page_of(results)
    assert "not a result row" in html


# -- history ---------------------------------------------------------------------------------------------

COMMITS = 60


def recorded(folder: Path, values: Callable[[int], dict[str, float]], commits: int = COMMITS) -> Path:
    """A history of commits, with the peak memory in bytes of cells."""

    def cells(number: int, _: object) -> list[Cell]:
        return [cell(key, peak_memory_bytes=value) for key, value in values(number).items()]

    return nightly(folder, commits, cells)


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


def assessed(folder: Path) -> list[Assessment]:
    history = read_history(folder)
    return [history.assess(series) for series in history.series()]


def test_series_with_steps_or_targets_are_drawn_and_others_are_lines(history: Path) -> None:
    assessments = assessed(history)
    (drawing,) = regressions_page.history_drawings(assessments)
    assert drawing.drawn is not None
    words = re.findall(r">(big|worse|better)<", drawing.drawn.content.decode())
    assert words == ["big", "worse", "better"]
    quiet = regressions_page.quiet_table(assessments)
    assert quiet is not None
    levels = {(line["metric"], line["cell"]): line["last"] for line in quiet.rows}
    assert levels["peak_memory_bytes", "same"] == "100"
    assert ("peak_memory_bytes", "worse") not in levels
    assert [*regressions_page.history_drawings(assessments, quiet=True)] == []  # all are exact


def test_a_step_is_marked_between_its_commits(history: Path) -> None:
    of = {each.series.cell: each for each in assessed(history) if regressions_page.is_notable(each)}
    shorts = [record.commit.short for record in read_history(history).records]
    places = {record.commit.hash: at for at, record in enumerate(read_history(history).records)}
    panels = dict(zip(of, history_figure([*of.values()], places).axes, strict=True))

    def marks(cell: str) -> dict[str, Any]:
        drawn = {each.get_gid(): each for each in panels[cell].get_children()}
        return {name: each for name, each in drawn.items() if name}

    assert {*marks("worse")} == {"values", "regression 32 33"}
    assert {*marks("better")} == {"values", "meant 19 20"}
    assert {*marks("big")} == {"values", "target 800"}
    across, values = marks("worse")["values"].get_data()
    assert [*across] == list(range(COMMITS))
    assert [*values] == [105 if at >= 33 else 100 for at in range(COMMITS)]
    (drawing,) = regressions_page.history_drawings(assessed(history))
    lines = {line["cell"]: line for line in drawing.rows}
    assert lines["big"]["target"] == "at most 800: MISSED"
    step = f"regression, stands: +5.00% (100 to 105) in {shorts[32]}..{shorts[33]}"
    assert (lines["worse"]["what changed"], lines["worse"]["last"]) == (step, "105")
    assert drawing.drawn is not None
    assert step in drawing.drawn.alt
    assert lines["better"]["what changed"].startswith("meant: smaller moments: -10.00% (100 to 90)")


def test_the_ends_of_a_series_are_named_once(tmp_path: Path) -> None:
    folder = recorded(tmp_path, lambda n: {"big": 900}, commits=1)
    (folder / "targets.yaml").write_text("targets: [{cell: big, metric: peak_memory_bytes, value: 800}]\n")
    (of,) = (each for each in assessed(folder) if regressions_page.is_notable(each))
    (panel,) = history_figure([of], {of.series.points[0].commit.hash: 0}).axes
    assert [text.get_text() for text in panel.get_xticklabels()] == [f"{commit(0).hash[:7]}\n2026-01-01"]


def test_the_overview_says_what_came_with_the_newest_commit(tmp_path: Path) -> None:
    def values(last: int) -> Callable[[int], dict[str, float]]:
        return lambda n: {"a": 105 if n >= last else 100, "b": 90 if n >= last else 100, "c": 100}

    newest = recorded(tmp_path / "newest", values(COMMITS - 1))
    _, change = regressions_page.changes(Gathered(tmp_path, tmp_path, newest, [], []))
    assert re.fullmatch(r"commit [0-9a-f]{7} of 2026-02-28", change.since)
    assert change.counts == {"judged": 6, "worse": 1, "better": 1, "new": 0, "standing": 1}
    assert change.worst == [("a: peak_memory_bytes", "regressions.html#history")]
    # an older regression stands, but is no news
    older = recorded(tmp_path / "older", values(30))
    _, change = regressions_page.changes(Gathered(tmp_path, tmp_path, older, [], []))
    assert change.counts == {"judged": 6, "worse": 0, "better": 0, "new": 0, "standing": 1}


def test_the_page_counts_what_stands(history: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    html = page_of(tmp_path / "results", history)
    facts = re.findall(r"<li><strong[^>]*>([^<]*)</strong> ([^<]*)</li>", html)
    assert ("1", "regressions of the history stand") in facts
    assert ("1", "targets missed") in facts
    assert ("2", "steps in 8 series over 60 commits, 1 of them meant") in facts


def test_a_clone_has_a_row_for_every_cell_of_published_tables(gathered: Gathered) -> None:
    declared = {
        cell.key
        for paper in gathered.papers
        for scenario in paper.in_order
        for cells in scenario.cells.values()
        for cell in cells
    }
    records = joined(paper.findings.records for paper in gathered.papers)
    keys = {*records.loc[records["of_table"], "cell"]} & declared
    assert len(keys) > 300
    assert keys <= {cell.row["key"] for cell in gathered.cells}


def test_numbers_of_the_reproduction_are_those_that_were_measured(gathered: Gathered, tmp_path: Path) -> None:
    """Without the baseline, RSA's Table 4 has the same memory and speeds, from rsa.csv."""
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results" / "reproduction", results / "reproduction")
    written = gather(results, None)
    assert {cell.origin for cell in written.cells} == {"reproduction"}
    rows = {cell.row["key"]: cell.row for cell in written.cells}
    compared = 0
    for each in gathered.cells:
        if each.scenario == "rsa_table4" and each.origin == "baseline":
            measured = each.row["measurement"]
            found = rows[each.row["key"]]
            # rows of earlier code lack axes that came later, of one rank
            assert found["cell"]["sizes"].items() >= each.row["cell"]["sizes"].items()
            assert found["status"] == each.row["status"]
            if each.row["status"] == "ok":
                assert found["measurement"]["peak_memory_bytes"] == measured["peak_memory_bytes"]
                assert found["measurement"]["tokens_per_s"] == pytest.approx(measured["tokens_per_s"], 1e-4)
                compared += 1
    assert compared == 15


def test_runs_have_precedence_over_baselines(small_results: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(small_results, results)
    line = json.loads((results / "baseline/rsa_table4/cells.jsonl").read_text().splitlines()[0])
    run = results / "runs" / "rsa_table4"
    run.mkdir(parents=True)
    (run / "cells.jsonl").write_text(json.dumps(line) + "\n")
    found = gather(results, None)
    assert [(cell.origin, cell.row["key"]) for cell in found.cells] == [("runs", line["key"])]
    line["measurement"]["peak_memory_bytes"] = "16"
    (run / "cells.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"cells.jsonl:1: .*measurement.peak_memory_bytes: '16'"):
        gather(results, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rsa.csv", "a,b\n1,2\n", "has no column 'table'"),
        ("rsa.csv", b"\xff\xfe", "UTF-16; save it in UTF-8"),
        ("rsa_runs.csv", "scenario\nrsa_table4\n", "has no column 'cells'"),
        ("rsa_runs.csv", None, "No such file"),
    ],
)
def test_a_spoilt_file_is_named(
    small_results: Path, tmp_path: Path, name: str, content: str | bytes | None, message: str
) -> None:
    results = tmp_path / "results"
    shutil.copytree(small_results, results)
    path = results / "reproduction" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=name) as caught:
        gather(results, None)
    assert message in str(caught.value)


def test_there_must_be_results(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="spbench reproduce all"):
        gather(tmp_path, None)
    with pytest.raises(UserError, match="not a folder"):
        gather(tmp_path / "none", None)
    with pytest.raises(UserError, match="--history"):
        gather(ROOT / "results", tmp_path / "none")
