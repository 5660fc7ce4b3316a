"""A checkout of spbench that is not what Python imports: a run says so, and the gate refuses it."""

import json
import shutil
from pathlib import Path

import pytest

from spbench.bench import measured_code
from spbench.bench.git import git
from spbench.bench.measure.sweep.provenance import project_commit, provenance
from spbench.bench.measured_code import checkout_of, imported_tree, unmeasured_checkout
from tests.tools.commands.conftest import Run

CHANGED = Path("impls", "strategies", "ulysses.py")
ROWS = Path("results", "runs", "small", "cells.jsonl")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The measured files of the imported tree in another folder, as a clone has them."""
    tree, copy = imported_tree(), tmp_path_factory.mktemp("clone")
    (copy / "pyproject.toml").touch()
    for path in measured_code._measured_files(tree):
        target = copy / path.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for words in ("init -q", "add pyproject.toml", "-c user.name=a -c user.email=a@b commit -qm first"):
        git(copy, *words.split())
    return copy


@pytest.fixture
def clone(copied: Path, spbench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The copy as working folder, with the scenario small.yaml, whose cells are made up, and its baseline."""
    shutil.rmtree(copied / "results" / "baseline", ignore_errors=True)
    shutil.copy(tmp_path / "small.yaml", copied)
    monkeypatch.chdir(copied)
    edit(copied, "")
    assert spbench("baseline", "--scenario", "small.yaml")[0] == 0
    return copied


def edit(clone: Path, text: str) -> None:
    """Add lines to a strategy of the checkout, which the tree that is imported does not have."""
    original = (imported_tree() / CHANGED).read_text()
    (clone / CHANGED).write_text(original + text)
    unmeasured_checkout.cache_clear()


def test_a_checkout_that_means_the_same_is_measured(clone: Path, spbench: Run) -> None:
    edit(clone, "# a comment\n")
    assert (checkout_of(clone / "impls"), checkout_of(clone.parent)) == (clone, None)
    code, _, err = spbench("run", "--scenario", "small.yaml")
    assert (code, "measured:" in err) == (0, False)
    assert spbench("compare", "results/baseline/small", "results/runs/small")[0] == 0


def test_the_gate_refuses_a_tree_that_is_not_measured(clone: Path, spbench: Run, tmp_path: Path) -> None:
    edit(clone, "SENT_TWICE = True\n")
    said = f"measured: {imported_tree()}, which differs from this checkout, {clone}, in {CHANGED}"
    commands = (
        ("run", "--scenario", "small.yaml"),
        ("baseline", "--scenario", "small.yaml"),
        ("compare", "results/baseline/small", "results/runs/small"),
        ("export", "--to", "markdown", "results/runs/small", "--base", "results/baseline"),
    )
    for words in commands:
        code, out, err = spbench(*words)
        assert (code, out, said in err, "pip install -e ." in err, err.count("\n")) == (2, "", True, True, 1)


def test_other_runs_say_once_what_was_measured(clone: Path, spbench: Run) -> None:
    edit(clone, "SENT_TWICE = True\n")
    shutil.rmtree(clone / "results" / "baseline")
    code, _, err = spbench("run", "--scenario", "small.yaml", "--fresh", "--variant", "first")
    assert (code, err.count("spbench: warning: measured: ")) == (0, 1)
    assert project_commit(clone) is None  # which is of code that was not run
    assert json.loads(ROWS.read_text().splitlines()[0])["provenance"]["tree"] == provenance()["tree"]


def test_the_gate_refuses_rows_of_other_code(clone: Path, spbench: Run) -> None:
    edit(clone, "")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    rows[0]["digest"]["code"] = "0" * 16
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = spbench("compare", "results/baseline/small", "results/runs/small")
    assert code == 2
    assert f"1 of {len(rows)} rows come from other code than this checkout has now" in err
    shutil.copytree("results/baseline/small", "elsewhere", dirs_exist_ok=True)
    assert spbench("compare", "elsewhere", "results/runs/small")[0] == 0  # any two results, which is no gate
