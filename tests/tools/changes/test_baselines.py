"""Committed rows that later runs are held against."""

import json
from pathlib import Path

from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.changes.baseline_command import FOLDER
from spbench.bench.tools.changes.result_files import read_results
from tests.bench.fakes import SCENARIO
from tests.tools.commands.conftest import Run

BASELINE = ("baseline", "--scenario", "small.yaml")
SMALL = Path("results/baseline/small")


def test_a_baseline_is_the_same_bytes_each_time(spbench: Run) -> None:
    files = [SMALL / name for name in ("cells.jsonl", "comparison.csv")]
    code, out, _ = spbench(*BASELINE)
    assert (code, out.splitlines()) == (0, [*map(str, files)])
    first = [file.read_bytes() for file in files]
    code, _, err = spbench(*BASELINE)
    assert (code, "running 5" in err) == (0, True)  # afresh
    assert [file.read_bytes() for file in files] == first
    rows = [json.loads(line) for line in first[0].splitlines()]
    keys = [row["key"] for row in rows]
    assert (keys, len(keys)) == (sorted(keys), 5)
    assert set(rows[0]) == {"key", "cell", "status", "reason", "measurement"}
    assert "step_time_samples_s" not in rows[0]["measurement"]
    code, _, err = spbench(*BASELINE, "--resume")
    assert (code, "running" in err) == (0, False)


def test_a_run_is_not_worse_than_its_baseline(spbench: Run) -> None:
    run = ("run", "--scenario", "small.yaml")
    assert spbench(*BASELINE)[0] == 0
    assert spbench(*run, "--fresh")[0] == 0
    assert spbench("compare", str(SMALL), "results/runs/small")[0] == 0
    assert spbench(*run, "--output", "part", "--world-size", "8")[0] == 0
    assert spbench("compare", str(SMALL), "part", "--subset")[0] == 0
    assert spbench("compare", str(SMALL), "part")[0] == 1


def test_failures_make_no_baseline(spbench: Run) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    assert spbench(*BASELINE)[0] == 1  # five ranks are a fault
    assert not SMALL.exists()
    assert spbench("baseline")[0] == 2
    assert spbench(*BASELINE, "--variant", "x")[0] == 2


def test_baselines_are_of_virtual_ranks(spbench: Run) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("defaults:", "defaults:\n  engine: distributed"))
    assert spbench(*BASELINE)[0] == 0
    rows = read_results(SMALL).cells.values()
    assert {row["cell"]["engine"] for row in rows} == {"virtual"}


def test_the_committed_baseline_is_of_the_gate_as_it_is() -> None:
    """Every cell of scenarios/gate.yaml, and no other, is in results/baseline/gate."""
    keys = {cell.key for cell in load_scenario("gate").cells[""]}
    assert read_results(Path(__file__).parents[3] / FOLDER / "gate").cells.keys() == keys
