"""Where rows come from: the commit of the code and of the project, and whether files differ from it. The
facts of the machine in the provenance of rows."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spbench
import spbench.bench.measure.sweep.provenance as bench_provenance
from spbench.bench.errors import UserError
from spbench.bench.git import asked, commit_of_files, git, own_checkout
from spbench.bench.measure.sweep.provenance import (
    MADE_FROM_ROWS,
    machine_facts,
    project_commit,
    provenance,
)
from spbench.bench.measure.sweep.results import RESULTS_FILE, read_rows
from spbench.bench.row import check_same_code, commit_of
from tests.bench.nvml_library import built, printed


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a file of code, one that is made from rows, a text, and published numbers."""
    for name in ("code.py", "results/reproduction/a.csv", "README.md", "results/papers/b.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        git(tmp_path, *words.split())
    return tmp_path


def test_what_is_made_from_rows_does_not_make_the_code_dirty(checkout: Path) -> None:
    """So that `spbench reproduce rsa --write` does not keep `spbench reproduce lasp --write` from writing."""
    clean = commit_of_files(checkout, MADE_FROM_ROWS)
    assert clean is not None
    assert len(clean) == 12
    (checkout / "results/reproduction/a.csv").write_text("2")
    (checkout / "README.md").write_text("2")
    (checkout / "untracked").write_text("2")
    assert commit_of_files(checkout, MADE_FROM_ROWS) == clean
    (checkout / "results/papers/b.csv").write_text("2")
    assert commit_of_files(checkout, MADE_FROM_ROWS) == f"{clean}-dirty"


def test_a_project_has_a_commit_of_its_own(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert project_commit(checkout / "results") == commit_of_files(checkout)
    assert project_commit(tmp_path_factory.mktemp("no repository")) is None
    if own := own_checkout():
        assert project_commit(own / "bench") is None  # its commit is that of the code


@pytest.mark.one_in(2)
@pytest.mark.parametrize("jobs", [0, 1])
def test_each_run_of_a_notebook_has_the_commit_of_then(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """Also where its rows go into a file of the project, which differs from the commit after the first."""
    monkeypatch.chdir(checkout)
    cells = [
        spbench.Cell(model="bert-tiny", strategy="tensor_parallel", batch=batch, seq_len=8)
        for batch in (1, 2, 3, 4)
    ]
    commits = [commit_of_files(checkout)]
    for chosen in (cells[:2], cells[2:]):
        spbench.run(chosen, output="own", jobs=jobs)
        rows, _ = read_rows(checkout / "own" / RESULTS_FILE)
        assert [row["provenance"]["project_commit"] for row in rows[-2:]] == commits[-1:] * 2
        git(checkout, "add", ".")
        git(checkout, *["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "more"])
        commits.append(commit_of_files(checkout))
    assert len({*commits}) == 3


def test_a_row_stands_for_its_project() -> None:
    assert commit_of({"provenance": {"commit": "a", "project_commit": "b"}}) == "b"
    assert commit_of({"provenance": {**provenance(), "commit": "a"}}) == "a"
    assert commit_of({"provenance": None}) == ""


@pytest.mark.parametrize("which", ["commit", "project_commit"])
def test_rows_must_be_of_one_commit(which: str) -> None:
    rows = [{"provenance": {which: commit}} for commit in ("1", "2", "1-dirty")]
    check_same_code({"a": rows[:1], "b": rows[:1]})
    with pytest.raises(UserError, match="b: rows come from commit 2, rows of a from 1, so that nothing"):
        check_same_code({"a": rows[:1], "b": rows[1:2]})
    with pytest.raises(UserError, match=r"a: rows come from code that is in no commit \(1-dirty\)"):
        check_same_code({"a": rows[2:]})


@pytest.mark.parametrize("row", [{}, {"provenance": None}, {"provenance": {"commit": None}}])
def test_rows_without_any_commit_are_of_one_code(row: dict[str, Any]) -> None:
    """They come from spbench without its repository; not beside rows that have a commit."""
    check_same_code({"a": [row, row], "b": [row]})
    known = {"provenance": {"commit": "1"}}
    with pytest.raises(UserError, match="b: rows come from commit 1, rows of a from unknown, so that"):
        check_same_code({"a": [row], "b": [known]})
    with pytest.raises(UserError, match="a: rows come from commit unknown, rows of a from 1, so that"):
        check_same_code({"a": [known, row]})


def test_what_git_refuses_is_one_line(tmp_path: Path) -> None:
    assert commit_of_files(tmp_path) is None
    assert asked(tmp_path, "rev-parse", "HEAD") == ""
    with pytest.raises(UserError, match=r"git rev-parse fails in .*not a git repository"):
        git(tmp_path, "rev-parse", "HEAD")


CODE = """
import json, sys
from spbench.bench.measure.sweep.provenance import machine_facts
print(json.dumps([machine_facts(), "torch" in sys.modules]))
"""


def test_this_machine() -> None:
    facts = machine_facts()
    assert provenance()["machine"] == facts
    assert facts["os"].startswith(os.uname().sysname)
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > 2**28
    assert facts["cpu"]


def test_gpus_are_named_by_the_driver_without_torch(tmp_path: Path) -> None:
    facts, torch_was_imported = printed(built(tmp_path), CODE)
    assert len(facts["gpus"]) == 2
    assert facts["gpus"][0].startswith("Test GPU")
    assert facts["gpu_driver"]
    assert not torch_was_imported


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds processes to cores")
def test_cores_are_those_that_the_process_may_use() -> None:
    code = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{CODE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert '"cores": 1' in done.stdout


@pytest.mark.parametrize(("name", "shown"), [("", "riscv64"), ("A64FX", "A64FX")])
def test_a_processor_without_a_name_is_its_architecture(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    """As in containers of other architectures, whose /proc/cpuinfo has no model name."""
    monkeypatch.setattr(
        bench_provenance, "open", lambda path, **how: io.StringIO("processor: 0\n"), raising=False
    )
    monkeypatch.setattr("platform.processor", lambda: name)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert bench_provenance.cpu_model() == shown
