"""`spbench compare --run`: both commits run, in turns, and nothing is left behind.

The code that is compared is a stand-in for spbench, in a repository of its own: a package that writes rows in
milliseconds, by which each test can say what differs.
"""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from tests.grid import data, tabled
from tests.tools.changes.rows import git

#: reads the turns that were taken before it from a file, so that times are in order without waiting
STAND_IN = data(__file__)["STAND_IN"]


class Project:
    """A repository with the stand-in, and the turns that were taken: (SECONDS of the code, arguments)."""

    def __init__(self, folder: Path):
        self.root, self.output, self._turns = folder / "repository", folder / "out", folder / "turns"
        self.main = self.root / "spbench" / "__main__.py"
        self.main.parent.mkdir(parents=True)
        (self.main.parent / "__init__.py").touch()
        self.main.write_text(STAND_IN)
        git(self.root, "init", "--quiet")
        git(self.root, "add", ".")
        git(self.root, "commit", "--quiet", "-m", "base")
        os.environ["TURNS"] = str(self._turns)

    def change(self, before: str, after: str) -> None:
        text = self.main.read_text()
        assert before in text
        self.main.write_text(text.replace(before, after, 1))

    def compare(self, *arguments: str, rounds: int = 6) -> int:
        words = ["compare", "--run", "--rounds", str(rounds), "--output", str(self.output), *arguments]
        return exit_code(words)

    @property
    def turns(self) -> list[Any]:
        return [json.loads(line) for line in self._turns.read_text().splitlines()]

    def is_clean(self) -> bool:
        return len(git(self.root, "worktree", "list").splitlines()) == 1


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("TURNS", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = Project(tmp_path)
    monkeypatch.chdir(made.root)
    return made


def test_a_slower_working_tree_is_found(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.change(
        "SECONDS, BYTES, STATUS, SCENARIOS = 1.0, 100", "SECONDS, BYTES, STATUS, SCENARIOS = 1.05, 101"
    )
    assert project.compare("HEAD", "--scenario", "small", "--strategy", "a", "--strategy", "b") == 1
    out = capsys.readouterr()
    assert [seconds for seconds, _ in project.turns] == [1.0, 1.05, 1.05, 1.0] * 3
    assert project.turns[0][1]["--strategy"] == "b"  # the last of both, as a dict has them
    assert "WORSE: 2 worse, 0 cells equal" in out.out
    assert all(
        word in out.out for word in ("step time", "1.00 s -> 1.05 s", "peak memory", "(+1.00%)", ", on here")
    )
    commit = git(project.root, "rev-parse", "HEAD")
    assert f"base is {commit[:12]}, new is {commit[:12]} with changes that are not committed" in out.err
    assert project.is_clean()
    # what is left can be compared again
    assert exit_code(["compare", str(project.output / "base"), str(project.output / "new")]) == 1


def test_two_commits_and_exact_numbers_alone(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", "exact")
    project.change('"ok", ("small",)', '"oom", ("small",)')
    git(project.root, "commit", "--quiet", "-am", "new")
    assert project.compare("HEAD~1", "HEAD", "--scenario", "small", "--format", "json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [(d["quantity"], d["base"], d["new"]) for d in found["differences"]] == [("status", "ok", "oom")]
    assert (found["base"], found["new"]) == tuple(
        git(project.root, "rev-parse", ref) for ref in ("HEAD~1", "HEAD")
    )
    assert (len(project.turns), project.is_clean()) == (2, True)  # one round says it all


@tabled(__file__, "errors_are_one_line")
def test_errors_are_one_line(
    project: Project, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert project.compare(*arguments) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert message.format(commit=git(project.root, "rev-parse", "HEAD")[:12]) in line
    assert project.is_clean()
    assert not list(project.root.parent.glob("spbench-*"))


def test_code_that_writes_no_rows_is_an_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN", "broken")  # which exits with 1, as a run does in which cells failed
    assert project.compare("HEAD", "--scenario", "small") == 2
    assert "cannot run this: RuntimeError: broken" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("STAND_IN", "slow")

    def interrupt() -> None:
        while not project._turns.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert project.compare("HEAD", "--scenario", "small") == 130
    thread.join()
    assert project.is_clean()
    assert not list(project.root.parent.glob("spbench-*"))
    assert not subprocess.run(
        ["pgrep", "-f", f"{project.root.parent}/spbench-rounds"], capture_output=True
    ).stdout


#: an installed spbench, whose numbers are those that a file of the project says
INSTALLED = data(__file__)["INSTALLED"]


@pytest.fixture
def own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a repository that is no checkout of spbench; its scenario was changed once."""
    package, folder = tmp_path / "installed" / "spbench", tmp_path / "repository" / "folder"
    for place, files in (
        (package, {"__init__.py": "", "__main__.py": INSTALLED}),
        (folder, {"my.yaml": "100"}),
    ):
        place.mkdir(parents=True)
        for name, text in files.items():
            (place / name).write_text(text)
    git(folder, "init", "--quiet", "--initial-branch", "main", "..")
    for day, text in enumerate(("100", "101"), start=1):
        (folder / "my.yaml").write_text(text)
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-0{day}T00:00:00+00:00")  # a history goes by dates
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return folder


def test_a_project_of_ones_own(own_project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each side has its own scenario, and a record the commit of its rows, whatever is checked out."""
    words = ["compare", "--run", "HEAD~1", "HEAD", "--scenario", "my.yaml", "--output", "out"]
    assert exit_code([*words, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(d["quantity"], d["base"], d["new"]) for d in found["differences"]] == [
        ("peak_memory_bytes", 100, 101)
    ]
    commits = [git(own_project, "rev-parse", ref) for ref in ("HEAD~1", "HEAD")]
    assert [found["base"], found["new"]] == commits
    assert len(git(own_project, "worktree", "list").splitlines()) == 1
    for side in ("base", "new"):
        assert exit_code(["record", f"out/{side}", "--history", "history", "--suite", "mine"]) == 0
    assert exit_code(["history", "history", "--fail-on-regression"]) == 1
    assert f"{commits[0][:12]}..{commits[1][:12]}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_project_with_the_real_spbench(
    own_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(own_project)
    text = "title: A small step\ndefaults: {cluster: dgx-a100}\ngroups:\n"
    for batch in (2, 3):
        cell = f"  - {{model: bert-tiny, strategy: single, batch: {batch}, seq_len: 32}}\n"
        Path("my.yaml").write_text(text + cell)
        git(own_project, "commit", "--quiet", "-am", str(batch))
    words = ["compare", "--run", "HEAD~1", "--scenario", "my.yaml", "--output", "out", "--format", "json"]
    assert exit_code(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert [d["verdict"] for d in found["differences"]] == ["missing", "new"]  # another batch, another cell
    (row,) = Path("out/base/cells.jsonl").read_text().splitlines()
    assert found["base"].startswith(json.loads(row)["provenance"]["project_commit"])
    assert exit_code(["run", "--scenario", "my.yaml", "--must-fit"]) == 0
    assert exit_code(["record", "results/runs/my", "--history", "history"]) == 0


@pytest.mark.slow
def test_the_code_of_this_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last commit against the working tree, each with its own code: rows name the commit that made them,
    and the command refuses those of another."""
    scenario = tmp_path / "my.yaml"
    scenario.write_text(
        "title: A small step\ndefaults: {cluster: dgx-a100}\ngroups:\n"
        "  - {model: bert-tiny, strategy: single, batch: 2, seq_len: 32}\n"
    )
    words = ["compare", "--run", "HEAD", "--scenario", str(scenario), "--output", str(tmp_path / "out")]
    assert exit_code([*words, "--format", "json"]) in (0, 1)  # the working tree may be worse
    found = json.loads(capsys.readouterr().out)
    rows = (tmp_path / "out" / "base" / "cells.jsonl").read_text().splitlines()
    assert [found["base"].startswith(json.loads(row)["provenance"]["commit"]) for row in rows] == [True]
