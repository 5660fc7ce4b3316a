"""What the site is made of."""

import json
import shutil
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.papers.comparison import joined
from spbench.bench.tools.report.gathered import Gathered, gather
from spbench.bench.tools.report.pages.regressions_page import gates
from tests.tools.report.conftest import ROOT


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
    for cell in gathered.cells:
        if cell.scenario == "rsa_table4" and cell.origin == "baseline":
            measured = cell.row["measurement"]
            found = rows[cell.row["key"]]
            # rows of earlier code lack axes that came later, of one rank
            assert found["cell"]["sizes"].items() >= cell.row["cell"]["sizes"].items()
            assert found["status"] == cell.row["status"]
            if cell.row["status"] == "ok":
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


def test_a_baseline_may_lie_elsewhere(small_results: Path, tmp_path: Path) -> None:
    for name in ("mine", "results/runs"):
        shutil.copytree(small_results / "baseline", tmp_path / name)
    found = gather(tmp_path / "results", None, tmp_path / "mine")
    assert {cell.origin for cell in found.cells} == {"runs"}
    (gate,) = gates(found.baseline, found.results / "runs")
    assert (gate.base, gate.problem) == (tmp_path / "mine" / gate.scenario, "")
    assert gate.judgement is not None
    assert gate.judgement.word == "not worse"
    with pytest.raises(UserError, match=r"--baseline .* is not a folder"):
        gather(tmp_path / "results", None, tmp_path / "none")


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
