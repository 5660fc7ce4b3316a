"""spbench report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spbench.bench.tools.report import build as building
from spbench.bench.tools.report import report_command as report
from tests.tools.commands.conftest import Run


def test_a_missing_library_is_one_line(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "NEEDED", ("itables", "no_such_module"))
    code, out, err = command_line("report", "--output", str(tmp_path / "site"))
    assert (code, out) == (2, "")
    command = "pip install -c constraints.txt -e '.[report]'"  # as docs/report.md has it
    assert command in (Path(__file__).parents[3] / "docs/report.md").read_text(encoding="utf-8")
    assert err.startswith(f"spbench: spbench report needs no_such_module: {command} (from PyPI")


def test_it_says_what_it_wrote_and_how_large_it_is(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "files", lambda *_: {"index.html": b"0123456789"})
    folder = tmp_path / "site"
    code, out, _ = command_line("report", "--output", str(folder), "--format", "json")
    assert code == 0
    content = json.loads(out)
    assert content["index"] == str(folder / "index.html")
    assert content["files"]["index.html"] == 10
    assert content["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert content["build_seconds"] > 0
