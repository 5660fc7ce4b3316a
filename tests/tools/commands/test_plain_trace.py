"""``--plain-trace``: the quick way to trace gives the numbers of the plain one, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing, narrowed_cells
from spbench.bench.measure.sweep.results import RESULTS_FILE, ResultsFile, read_rows
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measurement import Outcome
from tests.bench.fakes import SCENARIO
from tests.measure.sweep.test_digest import sweep_here
from tests.tools.commands.conftest import Run

#: a step of each: all operators alike; a ring, of which the quick way runs a few steps; ranks of unlike work
SMALL = """
title: Small steps
defaults: {cluster: piz-daint-p100, model: bert-tiny, batch: 4, seq_len: 64, precision: fp16}
groups:
  - {strategy: tensor_parallel, sizes: {tp: 2}}
  - {strategy: ring_self_attention, sizes: {sp: 8}}
  - {model: causal-transformer-tiny, strategy: [ring_attention, all_gather_kv], sizes: {sp: 4}}
"""


def measurements(folder: Path) -> dict[str, Any]:
    """What was measured, by the cells' keys."""
    rows, problems = read_rows(folder / RESULTS_FILE)
    assert not problems
    assert rows
    return {row["key"]: (row["status"], row["reason"], row["measurement"]) for row in rows}


def both(command_line: Run, scenario: str, folder: Path) -> None:
    """Run a scenario in both ways, and compare all that was measured."""
    for name, way in (("plain", "--plain-trace"), ("quick", "--fresh")):
        words = ["run", "--scenario", scenario, "--output", str(folder / name), way]
        code, _, messages = command_line(*words)
        assert code == 0, messages
        assert (folder / "cache" / "traces").exists() == (name == "quick")
    assert measurements(folder / "quick") == measurements(folder / "plain")


@pytest.mark.slow
def test_both_ways_measure_the_same_and_the_plain_one_keeps_no_trace(
    command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which keeps traces as a worker does."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr("spbench.bench.measure.sweep.sweep.sweep", traces.used()(sweep_here))
    both(command_line, str(tmp_path / "small.yaml"), tmp_path)
    assert tracing.PLAIN_TRACE not in os.environ


def test_a_plain_run_takes_no_earlier_result(command_line: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SCENARIO)
    words = ["run", "--scenario", str(tmp_path / "small.yaml"), "--output", str(tmp_path), "--dry-run"]
    (cell, *_) = narrowed_cells(load_scenario(str(tmp_path / "small.yaml")), Narrowing())
    with ResultsFile(tmp_path) as results:
        results.append(as_row(cell, Outcome("ok")))
    assert "kept (ok)" in command_line(*words)[1]
    assert "kept" not in command_line(*words, "--plain-trace")[1]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["gate", "rsa_table4", "lasp_scalability", "dsp_throughput"])
def test_both_ways_measure_the_same_in_whole_tables(
    command_line: Run, scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    both(command_line, scenario, tmp_path)
