"""Verdicts in a file: what a later run replaces, and what a reader is told of a spoilt one."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.verify.verdicts import (
    VERDICTS_FILE,
    VerifyRow,
    kept_verdicts,
    read_verdicts,
    verified_code,
)

GREEN = VerifyRow(
    strategy="lasp",
    model="tnl-tiny",
    part="block",
    size=2,
    mesh="sp2",
    dtype="fp64",
    batch=3,
    seq_len=24,
    status="green",
    error=1.5e-14,
    limit=1e-10,
    tensor="output y",
    rank=1,
)
RED = replace(GREEN, part="model", status="RED", error=0.5, verdict="is 0.5 times the reference")
MADE = {
    "backend": "ddp",
    "device": "cpu",
    "commit": "abc",
    "code": "c0de",
    "torch": "2",
    "time": "2026-01-01",
}


def keep(folder: Path, *rows: VerifyRow, **made: str) -> None:
    with kept_verdicts(folder, MADE | made) as found:
        found += map(asdict, rows)


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    refused = replace(GREEN, size=3, status="unsupported", error=None, rank=None, tensor="", reason="odd")
    keep(tmp_path, GREEN, RED, refused)
    found = read_verdicts(tmp_path)
    assert found == [asdict(row) | MADE for row in (GREEN, refused, RED)]
    lines = (tmp_path / VERDICTS_FILE).read_text().splitlines()
    assert json.loads(lines[0]) == MADE
    assert all("commit" not in line and "null" not in line for line in lines[1:])
    assert read_verdicts(tmp_path / "elsewhere") == []


def test_a_later_verdict_takes_the_place_of_an_earlier_one_on_its_case(tmp_path: Path) -> None:
    keep(tmp_path, GREEN, RED)
    keep(tmp_path, replace(RED, status="green", error=1e-15), commit="def")
    keep(tmp_path, RED, backend="zero1")
    found = {(row["part"], row["backend"]): (row["status"], row["commit"]) for row in read_verdicts(tmp_path)}
    assert found == {
        ("block", "ddp"): ("green", "abc"),
        ("model", "ddp"): ("green", "def"),
        ("model", "zero1"): ("RED", "abc"),
    }


def test_what_was_verified_before_an_error_is_kept(tmp_path: Path) -> None:
    def interrupted() -> None:
        with kept_verdicts(tmp_path, MADE) as found:
            found.append(asdict(GREEN))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(read_verdicts(tmp_path)) == 1


@pytest.mark.parametrize("line", ["{", "[]", '{"status": "green"}', '{"strategy": "lasp"}'])
def test_a_spoilt_file_is_refused_and_stays(tmp_path: Path, line: str) -> None:
    (tmp_path / VERDICTS_FILE).write_text(line + "\n")
    with pytest.raises(UserError, match=rf"{VERDICTS_FILE}:1: not a verdict"):
        keep(tmp_path, GREEN)
    assert (tmp_path / VERDICTS_FILE).read_text() == line + "\n"


def test_the_command_keeps_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(*arguments: Any, **options: Any) -> Iterator[VerifyRow]:
        options["expect"](2)
        yield GREEN
        yield replace(RED, error=float("inf"))

    monkeypatch.setattr("spbench.bench.tools.run.verify_output.verify_cases", verify)
    assert exit_code(["verify", "--backend", "zero1", "--device", "cpu", "--output", str(tmp_path)]) == 1
    assert str(tmp_path / VERDICTS_FILE) in capsys.readouterr().out
    found = read_verdicts(tmp_path)
    assert [(row["status"], row["error"], row["backend"]) for row in found] == [
        ("green", 1.5e-14, "zero1"),
        ("RED", None, "zero1"),
    ]
    assert {row["code"] for row in found} == {verified_code()}
    assert all(row["time"] and row["torch"] for row in found)


def test_no_committed_verdict_is_red() -> None:
    found = read_verdicts(Path(__file__).parents[3] / "results" / "verification")
    assert {row["strategy"] for row in found if row["status"] == "green"} >= {"lasp", "dsp", "ulysses"}
    assert [row for row in found if row["status"] == "RED"] == []
