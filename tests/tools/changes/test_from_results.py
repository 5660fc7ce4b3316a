"""Records of results: which commit and machine they are of, and results that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.git import git
from spbench.bench.tools.changes.from_results import Naming, record_of
from tests.tools.changes.records import MACHINE

FACTS = {name: value for name, value in MACHINE.items() if name != "host"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository on the branch trunk, with two commits."""
    folder = tmp_path_factory.mktemp("checkout")
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "code.py").write_text("1")
    git(folder, "add", ".")
    for message in ("first", "second"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        git(folder, *identity, "commit", "-qm", message, "--allow-empty")
    return folder


@pytest.fixture
def head(checkout: Path) -> str:
    return git(checkout, "rev-parse", "HEAD")


def row(key: str, engine: str = "virtual", **provenance: Any) -> dict[str, Any]:
    made_by = {"commit": None, "torch": "2.13.0", "python": "3.12", "host": "one", "machine": FACTS}
    measured = {"peak_memory_bytes": 1000, "step_time_s": 0.5, "step_time_samples_s": [0.4, 0.5, 0.6]}
    return {
        "key": key,
        "cell": {"engine": engine},
        "status": "ok",
        "reason": "",
        "measurement": {**measured, "ranks": provenance.pop("ranks", [])},
        "time": "2026-02-03T05:05:06+01:00",
        "provenance": {**made_by, **provenance},
    }


def results(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_record_has_the_commit_the_machine_and_the_metrics(
    tmp_path: Path, checkout: Path, head: str
) -> None:
    path = results(tmp_path / "gate", row("a", commit=head[:12]), row("b", "distributed", commit=head[:12]))
    for name in (path, path / "cells.jsonl"):
        record = record_of(name, Naming(repository=checkout))
        assert (record.suite, record.date) == ("gate", "2026-02-03T04:05:06+00:00")
    assert (record.commit.hash, record.commit.branch) == (head, "trunk")
    assert record.machine == MACHINE
    assert record.versions == {"torch": "2.13.0", "python": "3.12"}
    timed = {key: cell.values["step_time_s"] for key, cell in record.cells.items()}
    assert [(value.value, value.exact, value.samples) for value in timed.values()] == [
        (0.5, True, ()),
        (0.5, False, (0.4, 0.5, 0.6)),
    ]
    assert [cell.exact for cell in record.cells.values()] == [True, False]


def test_what_the_user_names_goes_first(tmp_path: Path, checkout: Path, head: str) -> None:
    naming = Naming("nightly", "runners", checkout, "main", head[:9])
    record = record_of(results(tmp_path / "a", row("a")), naming)
    assert (record.suite, record.commit.branch, record.machine["host"]) == ("nightly", "main", "runners")
    assert (record.commit.hash, record.machine["cpu"]) == (head, "AMD EPYC")


def test_gpus_are_those_of_the_ranks_where_the_driver_does_not_say(tmp_path: Path, checkout: Path) -> None:
    ranks = [{"rank": number, "host": "one", "device": "NVIDIA H100"} for number in range(2)]
    path = results(tmp_path / "a", row("a", "distributed", ranks=ranks))
    record = record_of(path, Naming(repository=checkout, commit="HEAD"))
    assert record.machine["gpus"] == ["NVIDIA H100", "NVIDIA H100"]


@pytest.mark.parametrize("where", ["repository", "cwd", "results"])
def test_the_commit_is_that_of_the_rows_and_not_of_today(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Yesterday's run of a project, whose files have changed since."""
    yesterday = git(checkout, "rev-parse", "HEAD^")
    folder = (checkout if where == "results" else tmp_path) / "runs"
    path = results(folder, row("a", commit="0" * 12, project_commit=yesterday[:12]))
    monkeypatch.chdir(checkout if where == "cwd" else tmp_path)
    (checkout / "code.py").write_text("2")
    try:
        record = record_of(path, Naming(repository=checkout if where == "repository" else None))
    finally:
        git(checkout, "checkout", "-q", "code.py")
    assert (record.commit.hash, record.commit.branch) == (yesterday, "trunk")
    assert record.versions == {"torch": "2.13.0", "python": "3.12"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("a", commit="1234567-dirty")], "made by code that is in no commit"),
        ([row("a", commit="1234567"), row("b", commit="7654321")], "rows were made by commit 7654321, those"),
        ([row("a")], "do not say which commit they are of; name it by --commit"),
        ([row("a", commit="1234567")], "has no commit 1234567, which made the results; fetch it, or name"),
        (
            [row("a", "distributed"), row("b", "distributed", host="two")],
            "were timed on one and on two, or one of them",
        ),
        (
            [row("a", "distributed", machine={**FACTS, "cores": 8}), row("b", "distributed")],
            "were timed on one",
        ),
        ([row("a") | {"time": "yesterday"}], "a time that is no date"),
        ([row("a") | {"measurement": {"step_time_s": -1}}], r"cells.jsonl:1: .*measurement.step_time_s: -1"),
    ],
)
def test_results_that_nobody_could_get_again_are_refused(
    tmp_path: Path, checkout: Path, rows: Sequence[dict[str, Any]], message: str
) -> None:
    has_commit = "commit" in message
    naming = Naming(repository=checkout, commit=None if has_commit else "HEAD")
    with pytest.raises(UserError, match=message):
        record_of(results(tmp_path / "a", *rows), naming)


def test_exact_cells_may_come_from_many_machines(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a", row("a", host="two"), row("b", "distributed"), row("c", host="three"))
    assert record_of(path, Naming(repository=checkout, commit="HEAD")).machine["host"] == "one"


def test_a_branch_is_named_where_none_is_checked_out(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a", row("a"))
    git(checkout, "checkout", "-q", "--detach")
    with pytest.raises(UserError, match="is on no branch; name that of the record by --branch"):
        record_of(path, Naming(repository=checkout, commit="HEAD"))
    git(checkout, "checkout", "-q", "trunk")


def test_suites_have_plain_names(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a b", row("a"))
    with pytest.raises(UserError, match="suite 'a b': give --suite a name of letters"):
        record_of(path, Naming(repository=checkout))


def test_a_file_of_pytest_benchmark_is_recorded(tmp_path: Path, checkout: Path, head: str) -> None:
    stats = {"median": 0.002, "data": [0.001, 0.002, 0.003]}
    content = {
        "machine_info": {"node": "one", "python_version": "3.12", "cpu": {"brand_raw": "AMD EPYC"}},
        "commit_info": {"id": head, "dirty": False},
        "datetime": "2026-02-03T04:05:06.789+00:00",
        "benchmarks": [{"name": "test_ring[4]", "fullname": "b.py::test_ring[4]", "stats": stats}],
    }
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(content))
    record = record_of(path, Naming(repository=checkout))
    assert (record.suite, record.commit.hash, record.date) == ("kernels", head, "2026-02-03T04:05:06+00:00")
    assert record.machine == {"host": "one", "cpu": "AMD EPYC"}
    value = record.cells["b.py::test_ring[4]"].values["time_s"]
    assert (value.value, value.exact, value.samples) == (0.002, False, (0.001, 0.002, 0.003))
