"""Measured numbers: what is found with noise as of a real machine, what is not, and what is not judged."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.tools.changes.change_evidence import FEWEST, measured_changes
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.metrics import merged_rounds, readings
from spbench.bench.tools.changes.result_files import read_results
from tests.tools.changes.noise import Machine
from tests.tools.changes.rows import raw

METRICS = 20


@pytest.mark.parametrize("deviation", [0.01, 0.05, None], ids=["1%", "5%", "as recorded"])
def test_reruns_of_the_same_code_raise_no_alarm(deviation: float | None) -> None:
    """At most one alarm in 200 comparisons: ten reruns of 20 metrics, each with 12 rounds."""
    machine = Machine(seed=1, deviation=deviation)
    alarms = [len(measured_changes(*machine.rows(METRICS, 12))[0]) for _ in range(10)]
    assert sum(alarms) <= 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("deviation", "rounds", "slower"), [(0.01, 12, 1.05), (0.02, 40, 1.05), (0.05, 40, 1.2)]
)
def test_a_slower_kernel_is_found(deviation: float, rounds: int, slower: float) -> None:
    """As often as docs/regressions.md says, among 19 that are as they were."""
    machine = Machine(seed=2, deviation=deviation)
    found = 0
    for _ in range(10):
        changes, _, _ = measured_changes(*machine.rows(METRICS, rounds, {0: slower}))
        assert len(changes) <= 2
        for change in changes.get("benchmark 0", []):
            assert change.interval is not None
            low, high = change.interval
            assert change.change > 0.03
            assert low < change.change < high
            found += 1
    assert found >= 9


def test_faster_is_better_and_little_is_nothing() -> None:
    machine = Machine(seed=3, deviation=0.002)
    changes, _, _ = measured_changes(*machine.rows(METRICS, 12, {0: 0.9, 1: 1.02}))
    assert list(changes) == ["benchmark 0"]  # 2% is certain, and less than the least effect
    assert changes["benchmark 0"][0].change == pytest.approx(-0.1, abs=0.01)


def test_rounds_count_and_not_samples() -> None:
    """One process in which all was slow is one observation, however many samples it has."""
    machine = Machine(seed=4, deviation=0.001)
    base, new = machine.rows(1, 12)
    slow = copy.deepcopy(new)
    entry = slow["benchmark 0"]["rounds"][3]
    entry["time_samples_s"] = [2 * sample for sample in entry["time_samples_s"]] * 100
    assert measured_changes(base, slow)[0] == {}


def test_pairs_cancel_what_drifts() -> None:
    machine = Machine(seed=5, deviation=0.005)
    sides = machine.rows(1, 12, {0: 1.05})
    for side in sides:
        for number, entry in enumerate(side["benchmark 0"]["rounds"]):
            entry["time_samples_s"] = [sample * 1.1**number for sample in entry["time_samples_s"]]
    assert list(measured_changes(*sides)[0]) == ["benchmark 0"]
    for entry in sides[1]["benchmark 0"]["rounds"]:
        entry["time"] = "9999"  # one side after the other: the drift may be all that differs
    assert measured_changes(*sides)[0] == {}


def one_process(factor: float = 1.0, samples: int = 10, **entries: Any) -> dict[str, Any]:
    """The row of a cell on real ranks, timed in one process."""
    times = [factor * (1 + 0.01 * number) for number in range(samples)]
    measurement = {
        "step_time_s": times[samples // 2],
        "step_time_samples_s": times,
        "peak_memory_bytes": 1000,
    }
    return {
        "a": raw("a", "distributed", **({"measurement": measurement, "provenance": {"host": "x"}} | entries))
    }


@pytest.mark.parametrize(
    ("new", "note"),
    [
        (
            one_process(9.0, provenance={"host": "y"}),
            "base was measured on x, new on y; spbench compare",
        ),
        (one_process(9.0, provenance={}), "base was measured on x, new on an unknown machine"),
        (one_process(9.0, FEWEST - 1), "fewer than 5 samples a side"),
        (one_process(9.0, measurement={"step_time_s": 9.0}), "there are no samples"),
        (one_process(-1.0), "a sample is not positive"),
        (
            one_process(1.9),
            "1 measured metric of one process a side: only changes of more than 100% are judged",
        ),
    ],
)
def test_what_is_not_judged_is_said(new: dict[str, Any], note: str) -> None:
    changes, unjudged, notes = measured_changes(one_process(), new)
    assert unjudged == ({"a"} if "only changes" not in note else set())
    assert changes == {}
    assert any(note in line for line in notes), notes


def test_how_much_could_be_seen_is_said() -> None:
    """A t-test of n rounds a side knows a change to about t * deviation * sqrt(2 / n), here 5.9%."""
    _, _, (note,) = measured_changes(*Machine(seed=5, deviation=0.05).rows(METRICS, 12))
    half, worst = (float(share) for share in re.findall(r"to within ([\d.]+)%", note))
    assert 4 < half < 8
    assert half < worst < 20


def test_a_median_and_a_minimum_that_disagree_are_no_change() -> None:
    new = one_process(3.0, 40)
    new["a"]["measurement"]["step_time_samples_s"][0] = 0.1
    assert measured_changes(one_process(samples=40), new)[0] == {}


def test_of_one_process_a_side_much_is_found() -> None:
    (change,) = measured_changes(one_process(), one_process(2.5))[0]["a"]
    assert (change.quantity, change.change) == ("step_time_s", pytest.approx(1.5))


@pytest.mark.parametrize(("nbytes", "differs"), [(1050, False), (1051, True), (949, True)])
def test_memory_of_real_ranks_has_a_least_effect_alone(nbytes: int, differs: bool) -> None:
    new = one_process()
    new["a"]["measurement"]["peak_memory_bytes"] = nbytes
    changes, _, _ = measured_changes(one_process(), new)
    assert [change.quantity for change in changes.get("a", [])] == ["peak_memory_bytes"] * differs


def test_other_facts_of_a_machine_are_compared_where_both_have_them() -> None:
    old = one_process(provenance={"host": "x"})
    same = one_process(9.0, provenance={"host": "x", "machine": {"cpu": "A", "gpus": ["G"]}})
    other = one_process(9.0, provenance={"host": "x", "machine": {"cpu": "B", "gpus": ["G"]}})
    assert measured_changes(old, same)[0]
    assert not measured_changes(same, other)[0]


def test_rounds_become_one_row() -> None:
    rounds = [list(one_process(factor, time=str(n)).values()) for n, factor in enumerate((1.0, 3.0, 2.0))]
    rounds[1][0] |= {"status": "failed"}
    (row,) = merged_rounds(rounds)
    assert row["status"] == "failed"
    reading = readings(row)["step_time_s"]
    assert (reading.value, len(reading.rounds), len(reading.samples)) == (2 * 1.05, 3, 30)
    exact = raw("v", measurement={"peak_memory_bytes": 1})
    assert merged_rounds([[exact], [exact]]) == [exact]


# -- pytest-benchmark ------------------------------------------------------------------------------------


def benchmarks(
    file: Path, factor: float, when: str, *names: str, commit: str = "a" * 40, **stats: Any
) -> None:
    """A file as --benchmark-json writes it, as far as it is read."""
    data = [factor * (1e-3 + 1e-5 * number) for number in range(10)]
    found = [
        {
            "name": name,
            "fullname": f"tests/test_x.py::{name}",
            "group": "g",
            "stats": {"median": data[5], "data": data} | stats,
        }
        for name in names
    ]
    machine = {"node": "here", "python_version": "3.12.1", "cpu": {"brand_raw": "CPU"}}
    content = {"machine_info": machine, "commit_info": {"id": commit, "dirty": False}, "datetime": when}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**content, "benchmarks": found}))


def test_a_file_of_pytest_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    benchmarks(old, 1.0, "2026-01-01", "test_a", "test_b", "test_gone")
    benchmarks(new, 3.0, "2026-01-02", "test_a")
    results = read_results(old)
    assert (results.commits, results.machines) == (["a" * 12], ["here (CPU)"])
    assert len(readings(results.cells["tests/test_x.py::test_a"])["time_s"].samples) == 10
    assert exit_code(["compare", str(old), str(new)]) == 1
    out = capsys.readouterr().out
    assert "WORSE: 1 worse, 2 missing" in out
    assert exit_code(["compare", str(old), str(old)]) == 0
    benchmarks(new, 3.0, "2026-01-02", "test_a", data=None)
    assert any("--benchmark-save-data keeps them" in note for note in judge(results, read_results(new)).notes)


def test_a_folder_of_files_is_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        benchmarks(tmp_path / "base" / f"{number}.json", 1 + 0.001 * number, f"{number}a", "test_a", "test_b")
        benchmarks(
            tmp_path / "new" / f"{number}.json", 1.05 + 0.0011 * number, f"{number}b", "test_a", "test_b"
        )
    assert exit_code(["compare", str(tmp_path / "base"), str(tmp_path / "new")]) == 1
    out = capsys.readouterr().out
    assert "99% interval (p)" in out
    assert "WORSE: 2 worse, 0 cells equal" in out
    benchmarks(tmp_path / "new" / "8.json", 1.0, "8b", "test_a", commit="b" * 40)
    with pytest.raises(UserError, match="several commits"):
        read_results(tmp_path / "new")


def test_what_pytest_benchmark_did_not_write_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"benchmarks": [{"name": "a"}]}')
    with pytest.raises(UserError, match=r"benchmarks\[0\].fullname: Field required"):
        read_results(tmp_path / "x.json")
