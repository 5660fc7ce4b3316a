"""``--plain-trace``: the quick way to trace gives the numbers of the plain one, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.engines import trace_cache, virtual
from spbench.bench.sweep.results import RESULTS_FILE, read_rows
from tests.bench.commands.conftest import Run
from tests.bench.fakes import SCENARIO


def measurements(folder: Path) -> dict[str, Any]:
    """What was measured, by the cells' keys."""
    rows, problems = read_rows(folder / RESULTS_FILE)
    assert not problems
    assert rows
    return {row["key"]: (row["status"], row["reason"], row["measurement"]) for row in rows}


def both(command_line: Run, scenario: str, folder: Path) -> None:
    """Run a scenario in both ways, and compare all that was measured."""
    for name, options in (("quick", ["--fresh"]), ("plain", ["--plain-trace"])):
        code, _, messages = command_line(
            "run", "--scenario", scenario, "--output", str(folder / name), *options
        )
        assert code == 0, messages
    assert measurements(folder / "quick") == measurements(folder / "plain")


def test_both_ways_measure_the_same(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    monkeypatch.setenv(trace_cache.TRACE_CACHE, str(tmp_path / "traces"))
    both(command_line, str(tmp_path / "small.yaml"), tmp_path)
    assert virtual.PLAIN_TRACE not in os.environ


def test_a_plain_run_keeps_no_trace_and_no_earlier_result(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    monkeypatch.setenv(trace_cache.TRACE_CACHE, str(tmp_path / "traces"))
    asked = ["run", "--scenario", str(tmp_path / "small.yaml"), "--strategy", "tensor_parallel"]
    for _ in range(2):
        code, _, messages = command_line(*asked, "--output", str(tmp_path / "plain"), "--plain-trace")
        assert code == 0
        assert "kept from before" not in messages
    assert not (tmp_path / "traces").exists()
    command_line(*asked, "--output", str(tmp_path / "quick"))
    assert list((tmp_path / "traces").glob("??/*"))


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["gate", "rsa_table4", "lasp_scalability", "dsp_throughput"])
def test_both_ways_measure_the_same_in_whole_tables(
    command_line: Run, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace_cache.TRACE_CACHE, str(tmp_path / "traces"))
    both(command_line, scenario, tmp_path)
