"""Records: written and read back, and files that are none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.from_results import add_record
from spbench.bench.tools.changes.history import read_history
from spbench.bench.tools.changes.run_record import as_lines, read_record, utc
from tests.tools.changes.records import MACHINE, OTHER, cell, commit, record

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
    assert isinstance(RECORD.cells["a"].values["peak_memory_bytes"].value, int)


def test_the_same_run_is_recorded_once(tmp_path: Path) -> None:
    path, _ = add_record(RECORD, tmp_path)
    before = path.stat().st_mtime_ns
    assert add_record(RECORD, tmp_path) == (path, False)
    assert path.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="has another record of that suite, commit, machine and second"):
        add_record(replace(RECORD, versions={}), tmp_path)


def test_no_two_runs_have_a_file_in_common(tmp_path: Path) -> None:
    others = (
        record(4),
        record(3, machine=OTHER),
        record(3, branch="other"),
        replace(RECORD, suite="weekly"),
        replace(RECORD, date=utc("2026-01-04T05:00:00")),
    )
    names = {add_record(found, tmp_path)[0].name for found in (RECORD, *others)}
    assert len(names) == 6
    assert RECORD.file_name == f"nightly_20260104T040000Z_{commit(3).short}_{RECORD.machine_name}.jsonl"


def test_a_machine_is_its_host_and_hardware() -> None:
    def name(**facts: object) -> str:
        return replace(RECORD, machine={**MACHINE, **facts}).machine_name

    assert name() == name(os="Linux 7", memory_bytes=2**34 - 2**22)
    others: list[dict[str, object]] = [{"host": "two"}, {"cpu": "Intel"}, {"cores": 4}, {"gpus": ["H100"]}]
    assert len({name(), name(memory_bytes=2**35), *(name(**facts) for facts in others)}) == 6
    assert replace(RECORD, machine={"host": "one"}).machine_name == "one"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (
            lambda text: "".join(text.splitlines(keepends=True)[:2]),
            "2: (cut short: 1 of 3",
        ),
        (lambda text: text[:-1], "4: (cut short: 3 of 3 cells"),
        (lambda text: "", "1: (Invalid JSON"),
        (
            lambda text: '{"key": "a", "status": "ok"}\n',
            "1: (spbench_record: Field req",
        ),
        (lambda text: "\x00\xff", "1: (Invalid JSON"),
        (
            lambda text: text.replace('"spbench_record":1', '"spbench_record":2'),
            "1: (sp",
        ),
        (
            lambda text: text.replace('"unit":"bytes"', '"unit":3', 1),
            "2: (values.peak_m",
        ),
        (lambda text: text.replace('"status":"oom"', '"status":"great"'), "4: (status"),
        (
            lambda text: text.replace("0.3,", "NaN,"),
            "3: (values.step_time_s.samples[1]",
        ),
        (lambda text: text.replace(":0.5,", ":-0.5,"), "2: (values.sent_bytes.value"),
        (lambda text: text.replace(":0.5,", ":true,"), "2: (values.sent_bytes.value"),
        (lambda text: re.sub(r'"memory_bytes":\d+', '"memory_bytes":Infinity', text), "1: (machine"),
        (lambda text: re.sub(r'"memory_bytes":\d+', '"memory_bytes":"16"', text), "1: (machine"),
    ],
)
def test_a_spoilt_file_is_named(tmp_path: Path, spoil: Callable[[str], str], problem: str) -> None:
    add_record(record(2, *RECORD.cells.values()), tmp_path)
    spoilt = tmp_path / "spoilt.jsonl"
    spoilt.write_text(spoil("".join(line + "\n" for line in as_lines(RECORD))), encoding="latin-1")
    with pytest.raises(UserError) as error:
        read_history(tmp_path)
    line, _, what = problem.partition(": ")
    assert f"{spoilt}:{line}: not a record of a run {what}" in str(error.value)


def test_a_history_without_a_record_is_an_error(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "none", "no such folder"), (tmp_path, "no records of runs: spbench")):
        with pytest.raises(UserError, match=message):
            read_history(folder)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*folder.jsonl: Is a directory"):
        read_history(tmp_path)
