"""Records: which commit and machine results are of, what is refused, and files that are no records.
github-action-benchmark and PyTorch HUD: what they take, and our values.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.history import read_history
from spbench.bench.tools.changes.metrics import readings
from spbench.bench.tools.changes.record_command import add_record, content_of, read_record, record_of, utc
from tests.grid import data, tabled
from tests.tools.changes.records import MACHINE, OTHER, cell, commit, record
from tests.tools.changes.rows import commit_all, folder, git, raw
from tests.tools.commands.conftest import Run

FACTS = {name: value for name, value in MACHINE.items() if name != "host"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository on the branch trunk, with two commits."""
    checkout = tmp_path_factory.mktemp("checkout")
    for text in ("0", "1"):
        (checkout / "code.py").write_text(text)
        commit_all(checkout)
    git(checkout, "branch", "-qm", "trunk")
    return checkout


@pytest.fixture
def head(checkout: Path) -> str:
    return git(checkout, "rev-parse", "HEAD")


def row(key: str, engine: str = "virtual", **provenance: Any) -> dict[str, Any]:
    made_by = {"commit": None, "torch": "2.13.0", "python": "3.12", "host": "one", "machine": FACTS}
    measured: dict[str, Any] = {"peak_memory_bytes": 1000, "step_time_s": 0.5}
    measured["step_time_samples_s"] = [0.4, 0.5, 0.6]
    measured["ranks"] = provenance.pop("ranks", [])
    when = "2026-02-03T05:05:06+01:00"
    return raw(key, engine, measurement=measured, time=when, provenance={**made_by, **provenance})


def results(path: Path, *rows: dict[str, Any]) -> Path:
    return folder(path, rows)


def test_a_record_has_the_commit_the_machine_and_the_metrics(
    tmp_path: Path, checkout: Path, head: str
) -> None:
    path = results(tmp_path / "gate", row("a", commit=head[:12]), row("b", "distributed", commit=head[:12]))
    for name in (path, path / "cells.jsonl"):
        record = record_of(name, repository=checkout)
        assert (record.suite, record.date) == ("gate", "2026-02-03T04:05:06+00:00")
    assert (record.commit.hash, record.commit.branch) == (head, "trunk")
    assert (record.origin.host, record.origin.machine) == ("one", FACTS)
    assert record.software == {"torch": "2.13.0", "python": "3.12", "os": "Linux 6"}
    timed = [readings(row)["step_time_s"] for row in record.rows]
    assert [(reading.value, reading.exact, reading.samples) for reading in timed] == [
        (0.5, True, ()),
        (0.5, False, (0.4, 0.5, 0.6)),
    ]


def test_what_the_user_names_goes_first(tmp_path: Path, checkout: Path, head: str) -> None:
    path = results(tmp_path / "a", row("a"))
    record = record_of(
        path, suite="nightly", machine="runners", repository=checkout, branch="main", commit=head[:9]
    )
    assert (record.suite, record.commit.branch, record.host) == ("nightly", "main", "runners")
    assert (record.commit.hash, record.origin.machine["cpu"]) == (head, "AMD EPYC")


def test_gpus_are_those_of_the_ranks_where_the_driver_does_not_say(tmp_path: Path, checkout: Path) -> None:
    ranks = [{"rank": number, "host": "one", "device": "NVIDIA H100"} for number in range(2)]
    path = results(tmp_path / "a", row("a", "distributed", ranks=ranks))
    record = record_of(path, repository=checkout, commit="HEAD")
    assert record.origin.machine["gpus"] == ["NVIDIA H100", "NVIDIA H100"]


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
        record = record_of(path, repository=checkout if where == "repository" else None)
    finally:
        git(checkout, "checkout", "-q", "code.py")
    assert (record.commit.hash, record.commit.branch) == (yesterday, "trunk")
    assert record.software == {"torch": "2.13.0", "python": "3.12", "os": "Linux 6"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("a", commit="1234567-dirty")], "come from code that is in no commit"),
        ([row("a", commit="1234567"), row("b", commit="7654321")], "rows come from commit 7654321, rows of"),
        ([row("a")], "do not name their commit; name it by --commit"),
        ([row("a", commit="1234567")], "has no commit 1234567, from which the results come; fetch"),
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
    commit = None if "commit" in message else "HEAD"
    with pytest.raises(UserError, match=message):
        record_of(results(tmp_path / "a", *rows), repository=checkout, commit=commit)


def test_exact_cells_may_come_from_many_machines(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a", row("a", host="two"), row("b", "distributed"), row("c", host="three"))
    assert record_of(path, repository=checkout, commit="HEAD").origin.host == "one"


def test_a_branch_is_named_where_none_is_checked_out(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a", row("a"))
    git(checkout, "checkout", "-q", "--detach")
    with pytest.raises(UserError, match="is on no branch; name that of the record by --branch"):
        record_of(path, repository=checkout, commit="HEAD")
    git(checkout, "checkout", "-q", "trunk")


def test_suites_have_plain_names(tmp_path: Path, checkout: Path) -> None:
    path = results(tmp_path / "a b", row("a"))
    with pytest.raises(UserError, match="suite 'a b': give --suite a name of letters"):
        record_of(path, repository=checkout)


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
    record = record_of(path, repository=checkout)
    assert (record.suite, record.commit.hash, record.date) == ("kernels", head, "2026-02-03T04:05:06+00:00")
    assert (record.origin.host, record.origin.machine) == ("one", {"cpu": "AMD EPYC"})
    (benchmark,) = record.rows
    reading = readings(benchmark)["time_s"]
    assert (benchmark["key"], reading.value, reading.samples) == (
        "b.py::test_ring[4]",
        0.002,
        (0.001, 0.002, 0.003),
    )


# -- files -----------------------------------------------------------------------------------------------

RECORD = record(
    3,
    cell("a", peak_memory_bytes=2**53 - 1, sent_bytes=0.5),
    cell("b", exact=False, step_time_s=[0.1, 0.3, 0.2]),
    cell("c", status="oom"),
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, is_new = add_record(RECORD, tmp_path / "made")
    assert is_new
    assert read_record(path) == RECORD


def test_the_same_run_is_recorded_once(tmp_path: Path) -> None:
    path, _ = add_record(RECORD, tmp_path)
    before = path.stat().st_mtime_ns
    assert add_record(RECORD, tmp_path) == (path, False)
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="has another record of that suite, commit, machine and second"):
        add_record(replace(RECORD, rows=RECORD.rows[:1]), tmp_path)


def test_no_two_runs_have_a_file_in_common(tmp_path: Path) -> None:
    others = (
        record(4, cell("a")),
        record(3, cell("a"), machine=OTHER),
        record(3, cell("a"), branch="other"),
        replace(RECORD, suite="weekly"),
        replace(RECORD, date=utc("2026-01-04T05:00:00")),
    )
    names = {add_record(found, tmp_path)[0].name for found in (RECORD, *others)}
    assert len(names) == 6
    assert RECORD.file_name == f"nightly_20260104T040000Z_{commit(3).short}_{RECORD.machine_name}.jsonl"


def test_a_machine_is_its_host_and_hardware() -> None:
    def name(**facts: object) -> str:
        return record(3, cell("a"), machine={**MACHINE, **facts}).machine_name

    assert name() == name(os="Linux 7", memory_bytes=2**34 - 2**22)
    others: list[dict[str, object]] = [{"host": "two"}, {"cpu": "Intel"}, {"cores": 4}, {"gpus": ["H100"]}]
    assert len({name(), name(memory_bytes=2**35), *(name(**facts) for facts in others)}) == 6
    assert record(3, cell("a"), machine={"host": "one"}).machine_name == "one"
    assert replace(RECORD, host="runners").machine_name == name(host="runners")


@tabled(__file__, "a_spoilt_file_is_named")
def test_a_spoilt_file_is_named(tmp_path: Path, part: str, instead: str, problem: str) -> None:
    add_record(record(2, cell("a")), tmp_path)
    spoilt = tmp_path / "spoilt.jsonl"
    content = content_of(RECORD)
    text = re.sub(part, instead, content, count=1)
    assert text != content
    spoilt.write_text(text, encoding="latin-1")
    with pytest.raises(UserError) as error:
        read_history(tmp_path)
    line, _, what = problem.partition(": ")
    assert f"{spoilt}:{line}: not a record of a run {what}" in str(error.value)


def test_a_history_without_a_record_is_an_error(tmp_path: Path) -> None:
    for place, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no records of runs: spbench")):
        with pytest.raises(UserError, match=message):
            read_history(place)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*folder.jsonl: Is a directory"):
        read_history(tmp_path)


SCHEMAS = data(Path(__file__).with_name("schemas.yaml"))


def test_both_take_what_is_exported(results: Path, tmp_path: Path, command_line: Run) -> None:
    """Of HUD also that a Float32, which it keeps, holds the MiB."""
    words = ("export", str(results), "--output", str(tmp_path / "o"), "--to")
    assert command_line(*words, "github-action")[0] == 0
    for path in (tmp_path / "o").iterdir():
        jsonschema.validate(json.loads(path.read_text()), SCHEMAS["github-action"])
    records = json.loads(command_line("export", str(results), "--to", "hud")[1])
    jsonschema.validate(records, SCHEMAS["hud"])
    peaks = [record["metric"] for record in records if record["metric"]["name"] == "peak_memory_mib"]
    assert len(peaks) == 4
    for peak in peaks:
        (kept,) = struct.unpack("f", struct.pack("f", *peak["benchmark_values"]))
        exact = int(peak["extra_info"]["exact_value"])
        assert abs(kept * 2**20 - exact) <= 2**-24 * exact
