"""`spbench record` and `spbench history`: what they print, their exit codes and their errors.

A checkout of spbench that is not what Python imports: a run says so, and the gate refuses it.
"""

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest

from spbench.bench import measured_code
from spbench.bench.command_line.output import Output
from spbench.bench.git import git
from spbench.bench.measure.sweep.provenance import project_commit, provenance
from spbench.bench.measured_code import checkout_of, imported_tree, unmeasured_checkout
from spbench.bench.tools.changes.history import read_history
from spbench.bench.tools.changes.history_command import changes_table
from tests.terminal import faults_of
from tests.tools.changes.records import Cell, cell, commit, nightly, record
from tests.tools.changes.test_records import checkout as checkout
from tests.tools.changes.test_records import results, row
from tests.tools.commands.conftest import Run


def cells(number: int, generator: random.Random) -> list[Cell]:
    larger = number >= 4
    return [
        cell("lasp/sp4", sent_bytes=2**30 + larger, peak_memory_bytes=1000),
        cell("dsp/sp4", sent_bytes=64),
    ]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Six commits, of which the fifth makes one cell send one byte more."""
    return nightly(tmp_path / "history", 6, cells)


RANGE = f"{commit(3).short}..{commit(4).short}"


def test_results_are_recorded_once_and_shown(command_line: Run, tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "gate", row("a", commit=git(checkout, "rev-parse", "HEAD")[:12]))
    arguments = ("record", str(path), "--history", str(tmp_path / "h"), "--repository", str(checkout))
    code, out, err = command_line(*arguments)
    assert (code, err, ": recorded\n" in out, "1 cells of gate at " in out) == (0, "", True, True)
    (file,) = (tmp_path / "h").iterdir()
    assert str(file) in out
    assert "were recorded already" in command_line(*arguments)[1]
    content = json.loads(command_line(*arguments, "--format", "json")[1])
    assert (content["recorded"], content["branch"], content["file"]) == (False, "trunk", str(file))
    code, out, _ = command_line("history", str(tmp_path / "h"), "--metric", "peak_memory_bytes")
    assert (code, "peak_memory_bytes (bytes) of a, gate" in out, "|  1000 |" in out) == (0, True, True)


def test_what_changed_is_told_by_strategy(tmp_path: Path) -> None:
    """One change of five cells is a line for each strategy and metric, whichever cells they are."""

    def grown(number: int, generator: random.Random) -> list[Cell]:
        return [
            cell(
                f"bert-tiny/{strategy}/sp{ranks}/b2/L24/fp32/local/virtual/0",
                sent_bytes=1000 * ranks * (1 + 0.01 * ranks * (number >= 4)),
                peak_memory_bytes=1000,
                step_time_s=0.5,
            )
            for strategy, ranks in itertools.product(("ulysses", "lasp"), (2, 4, 8))
        ]

    history = read_history(nightly(tmp_path, 6, grown))
    assessments = [history.assess(series) for series in history.series()]
    (table,) = changes_table(assessments)
    shown = [
        (line[""], line["strategy"], line["cells"], line["change"], line["commits"]) for line in table.lines
    ]
    assert shown == [
        ("regression", "lasp", 3, "+2.00% to +8.00%", RANGE),
        ("regression", "ulysses", 3, "+2.00% to +8.00%", RANGE),
    ]
    assert faults_of(Output([table]), most_lines=7) == []
    assert list(changes_table([each for each in assessments if not each.steps])) == []


def test_a_regression_fails_until_it_is_said_to_be_meant(command_line: Run, history: Path) -> None:
    arguments = ("history", str(history), "--fail-on-regression")
    code, out, _ = command_line(*arguments)
    assert code == 1
    # the line below the hint can be pasted
    text = out.partition("meant.yaml:\n")[2].splitlines()[0].replace("...", "heads are padded")
    (history / "meant.yaml").write_text(f"meant:\n{text}\n")
    code, out, _ = command_line(*arguments)
    assert (code, "| regression (meant) |" in out, "| heads are padded |" in out) == (0, True, True)
    assert out.splitlines()[-1] == "no regression: 7 series, 1 step, 1 of them meant"


def test_a_missed_target_fails(command_line: Run, history: Path) -> None:
    arguments = ("history", str(history), "--fail-on-regression", "--metric", "peak_memory_bytes")
    for value, code, text in ((1000, 0, "; at most 1000\n"), (999, 1, "; at most 999: MISSED\n")):
        (history / "targets.yaml").write_text(
            f"targets: [{{cell: lasp, metric: peak_memory_bytes, value: {value}}}]"
        )
        found = command_line(*arguments)
        assert (found[0], text in found[1]) == (code, True)


def test_what_is_passed_over_is_said(command_line: Run, history: Path) -> None:
    from spbench.bench.tools.changes.record_command import add_record

    add_record(record(7, cell("a"), branch="topic"), history)
    (history / "meant.yaml").write_text("meant: [{commit: '1234567', reason: soon}]")
    out = command_line("history", str(history))[1]
    assert "note: branch main; 1 record of topic left out\n" in out
    assert "warning: no record of commit 1234567, which was meant: soon\n" in out


@pytest.mark.parametrize("count", [3, 4])
def test_three_series_are_shown_commit_by_commit_and_more_by_their_ends(
    command_line: Run, tmp_path: Path, count: int
) -> None:
    def grown(number: int, generator: random.Random) -> list[Cell]:
        return [cell(f"{name}/x", peak_memory_bytes=1000 + number) for name in range(count)]

    history = nightly(tmp_path, 3, grown)
    lines = command_line("history", str(history), "--metric", "peak_memory_bytes")[1].splitlines()
    by_commit = sum(line.startswith("peak_memory_bytes (bytes) of ") for line in lines)
    ends = [line.split()[3:6:2] for line in lines if line.startswith("| peak_memory_bytes |  1000 |")]
    assert (by_commit, ends) == ((3, []) if count == 3 else (0, [["1000", "1002"]] * 4))
    assert ("What changed, by strategy" in lines) == (count == 4)


CHANGED = Path("impls", "strategies", "ulysses.py")
ROWS = Path("results", "runs", "small", "cells.jsonl")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The measured files of the imported tree in another folder, as a clone has them; all but the one that is
    edited are links, whose digests are kept."""
    tree, copy = imported_tree(), tmp_path_factory.mktemp("clone")
    (copy / "pyproject.toml").touch()
    for path in measured_code._measured_files(tree):
        target = copy / path.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    (copy / CHANGED).unlink()
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
