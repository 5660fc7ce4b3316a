"""The functions of the public API, as a notebook or a script uses them. The names of our folders are free for
users: files of theirs with these names are not imported for ours."""

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spbench
from spbench.bench.measure.sweep.results import RESULTS_FILE
from tests.api.user_folder import NAMES, UserFolder

ROOT = Path(__file__).parents[2]
SCENARIO = """
title: Two strategies
defaults: {model: bert-tiny, batch: 2, seq_len: 24}
groups:
  - {strategy: [tensor_parallel, ring_self_attention]}
"""
#: a script without a guard of its main module
SCRIPT = """
import spbench
print("started")
cell = spbench.Cell(model="bert-tiny", strategy="ring_self_attention", sizes={"sp": 2}, batch=2, seq_len=24)
cells = [cell.model_copy(update={"engine": engine}) for engine in ("virtual", "distributed")]
table = spbench.run(cells, jobs=1)
print(*table["status"], *table["reason"], table["peak_memory_bytes"].nunique())
"""


def cell(**changes: object) -> spbench.Cell:
    content = {"model": "bert-tiny", "strategy": "single", "batch": 2, "seq_len": 24}
    return spbench.Cell.model_validate(content | changes)


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SCENARIO)
    return path


def test_the_example_in_the_docstring() -> None:
    found = doctest.testmod(spbench)
    assert found.attempted >= 5
    assert found.failed == 0


def test_a_scenario_is_run_in_part(scenario: Path) -> None:
    table = spbench.run(scenario, strategies=["tensor_parallel"], world_sizes=[1, 2], jobs=0)
    assert table[["strategy", "world_size", "status"]].values.tolist() == [
        ["tensor_parallel", 1, "ok"],
        ["tensor_parallel", 2, "ok"],
    ]
    assert (table["peak_memory_bytes"] > 0).all()
    loaded = spbench.load_scenario(scenario)
    assert loaded.cells[""][0].key in set(table["key"])


def test_cells_are_rows_in_their_order() -> None:
    cells = [cell(batch=4), cell(batch=1), cell(batch=4)]
    assert spbench.run(cells, jobs=0)["batch"].tolist() == [4, 1]


def test_an_output_folder_keeps_rows(tmp_path: Path) -> None:
    first = spbench.run([cell()], output=tmp_path / "kept", jobs=0)
    both = spbench.run([cell(), cell(batch=1)], output=tmp_path / "kept", jobs=0)
    assert first["elapsed_s"][0] == both["elapsed_s"][0]  # not measured again
    assert spbench.read_results(tmp_path / "kept").equals(both)
    assert spbench.read_results(tmp_path / "kept" / RESULTS_FILE).equals(both)
    spbench.run([cell()], output=tmp_path / "kept", fresh=True, jobs=0)
    assert len(spbench.read_results(tmp_path / "kept")) == 1


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert spbench.run(cell(), jobs=0)["status"].tolist() == ["ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_cannot_run_is_a_row() -> None:
    (row,) = spbench.run(cell(strategy="ring_self_attention", sizes={"sp": 5}), jobs=0).to_dict("records")
    assert row["status"] == "unsupported"
    assert "not divisible by 5 ranks" in row["reason"]


def test_errors_are_the_users(tmp_path: Path, scenario: Path) -> None:
    for what, message in (
        (lambda: spbench.run("max_seqlem"), "unknown scenario 'max_seqlem'; did you mean 'max_seqlen'?"),
        (lambda: spbench.run(scenario, strategies=["lsp"]), "unknown strategy 'lsp'; did you mean 'lasp'?"),
        (lambda: spbench.run(cell(), models=["tnl-tiny"]), "cells are run as they are"),
        (lambda: spbench.run([]), "there is no cell to run"),
        (lambda: spbench.run(cell(model="bort")), "unknown model 'bort'"),
        (lambda: spbench.read_results(tmp_path), "no results file"),
        (lambda: spbench.verify(["lsp"]), "unknown strategy 'lsp'"),
    ):
        with pytest.raises(spbench.UserError) as caught:
            what()
        assert message in str(caught.value)


def test_lines_that_are_no_rows_are_warned_of(tmp_path: Path) -> None:
    spbench.run(cell(), output=tmp_path, jobs=0)
    with (tmp_path / RESULTS_FILE).open("a") as file:
        file.write("{}\n")
    with pytest.warns(UserWarning, match=r"cells.jsonl:2: not a result row, skipped"):
        assert len(spbench.read_results(tmp_path)) == 1


def test_verify_returns_a_row_a_case() -> None:
    table = spbench.verify(["lasp"], ["tnl-tiny"], world_sizes=[1], parts=["attention"])
    assert set(table["status"]) == {"green"}
    assert set(table["part"]) == {"attention"}
    assert (table["error"] <= table["limit"]).all()


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    """Its workers and their ranks do not run it again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["started", "ok", "ok", "1"], done.stderr


#: what stands on the path where spbench is installed: a folder with nothing else in it
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def user(tmp_path: Path) -> UserFolder:
    return UserFolder(tmp_path, path=[SOURCE])


def test_only_spbench_is_offered() -> None:
    names = {path.name for path in SOURCE.iterdir() if path.suffix != ".egg-info"}
    assert names == {"spbench"}


@pytest.mark.parametrize("name", NAMES)
def test_the_users_file_is_the_one_imported(user: UserFolder, name: str) -> None:
    assert f"imported the {name}.py of the user" in user.run("-c", f"import spbench, {name}").stderr


@pytest.mark.slow
def test_the_command_runs_among_them(user: UserFolder) -> None:
    """Listings, workers in processes of their own, and two real ranks below one of them."""
    listed = user.run("-m", "spbench", "list", "--format", "json")
    assert "ring_self_attention" in json.loads(listed.stdout)["strategies"], listed.stderr
    arguments = ("--scenario", "mine.yaml", "--jobs", "2", "--output", "rows", "--format", "json")
    ran = user.run("-m", "spbench", "run", *arguments)
    statuses = [(row["cell"]["engine"], row["status"]) for row in json.loads(ran.stdout)["rows"]]
    assert statuses == [("virtual", "ok"), ("distributed", "ok"), ("virtual", "ok")], ran.stderr


@pytest.mark.slow
def test_a_suite_of_the_user_imports_spbench(user: UserFolder) -> None:
    done = user.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
