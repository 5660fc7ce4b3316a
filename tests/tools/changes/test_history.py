"""Histories: series, their steps with the commits that made them, targets, and what was meant. Measured
numbers: what is found with noise as of a real machine, what is not, and what is not judged.
"""

import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.tools.changes.change_evidence import FEWEST, measured_changes
from spbench.bench.tools.changes.history import (
    TARGETS_FILE,
    Assessment,
    History,
    Target,
    read_entries,
    read_history,
)
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.metrics import merged_rounds, readings
from spbench.bench.tools.changes.record_command import add_record
from spbench.bench.tools.changes.result_files import read_results
from tests.grid import tabled
from tests.tools.changes.noise import Machine
from tests.tools.changes.records import MACHINE, OTHER, Cell, cell, commit, nightly, noisy, record
from tests.tools.changes.rows import raw

COMMITS, SLOWER, LARGER = 60, 41, 23
NOISES = (0.01, 0.02, 0.03)


def planted(number: int, generator: random.Random) -> Sequence[Cell]:
    """Timed cells with noise of 1 to 3%, one of which becomes 5% slower, and exact ones, of which one sends a
    byte more."""
    found = []
    for place in range(6):
        level = 0.1 * (place + 1) * (1.05 if place == 1 and number >= SLOWER else 1)
        samples = noisy(generator, level, NOISES[place % 3])
        found.append(cell(f"real/{place}", exact=False, step_time_s=samples, sent_bytes=1000.0))
        sent = 4096 * place + (place == 4 and number >= LARGER)
        found.append(cell(f"virtual/{place}", sent_bytes=sent, step_time_s=1.5, peak_memory_bytes=10**9))
    return found


def assessed(folder: Path, **chosen: str) -> list[Assessment]:
    history = read_history(folder)
    return [history.assess(series) for series in history.series(**chosen)]


def test_planted_steps_are_found_with_their_commits_and_no_others(tmp_path: Path) -> None:
    found = assessed(nightly(tmp_path, COMMITS, planted, (MACHINE, OTHER)))
    steps = {(a.series.cell, a.series.metric.name, a.series.machine): a.steps for a in found if a.steps}
    machines = {a.series.machine for a in found} - {""}
    # 12 statuses of two engines, 6 timings on two machines, 6 x 2 + 6 x 4 exact metrics
    assert len(found) == 6 + 12 + 12 + 36
    assert set(steps) == {("virtual/4", "sent_bytes", "")} | {("real/1", "step_time_s", m) for m in machines}
    assert len(machines) == 2
    for (_, metric, _), (step,) in steps.items():
        assert step.verdict == "regression"
        hashes = [commit(number).hash for number in range(COMMITS)]
        first, last = (hashes.index(point.commit.hash) for point in (step.last_before, step.first_after))
        place = LARGER if metric == "sent_bytes" else SLOWER
        assert first < place <= last
        assert last - first <= (1 if metric == "sent_bytes" else 4)
        assert step.commit_range == f"{commit(first).short}..{commit(last).short}"
        assert step.change == pytest.approx(1 / (4 * 4096) if metric == "sent_bytes" else 0.05, rel=0.3)
    assert {a.series.cell for a in found if a.fails} == {"virtual/4", "real/1"}


def test_timings_of_machines_are_not_mixed_and_exact_values_are_joined(tmp_path: Path) -> None:
    """A slower machine that takes over half way is no step; a byte that it is the first to send is."""
    for number in range(20):
        slow = number >= 10
        timed = cell("a", exact=False, step_time_s=[0.2 if slow else 0.1] * 3)
        exact = cell("b", sent_bytes=11 if slow else 10)
        add_record(record(number, timed, exact, machine=OTHER if slow else MACHINE), tmp_path)
    found = assessed(tmp_path)
    assert [len(a.series.points) for a in found if a.series.metric.name == "step_time_s"] == [10, 10]
    steps = [(a.series.cell, step.commit_range) for a in found for step in a.steps]
    assert steps == [("b", f"{commit(9).short}..{commit(10).short}")]
    machine = record(0, cell("a"), machine=OTHER).machine_name
    assert {a.series.machine for a in assessed(tmp_path, machine=machine)} == {"", machine}


def history_of(folder: Path, *values: float | None, status: Sequence[str] = ()) -> History:
    """A history of one exact cell, by commits; None: the record has another cell alone."""
    for number, value in enumerate(values):
        said = status[number] if status else "ok"
        cells = [] if value is None else [cell("a", said, step_time_s=value)]
        add_record(record(number, cell("other"), *cells), folder)
    return read_history(folder)


def steps_of(history: History, metric: str) -> list[tuple[str, str, str]]:
    (series,) = history.series(metric=metric, cell="a")
    return [
        (series.spelled(step.before), series.spelled(step.after), step.verdict)
        for step in history.assess(series).steps
    ]


def test_exact_values_below_the_tolerance_do_not_add_up_unseen(tmp_path: Path) -> None:
    history = history_of(tmp_path, *(1 + 4e-7 * number for number in range(6)))
    assert [verdict for _, _, verdict in steps_of(history, "step_time_s")] == ["regression"]


def test_a_status_that_changes_is_a_step(tmp_path: Path) -> None:
    history = history_of(tmp_path, 1, 1, 1, 1, status=["ok", "oom", "failed", "ok"])
    assert steps_of(history, "status") == [
        ("ok", "oom", "regression"),
        ("oom", "failed", "regression"),
        ("failed", "ok", "improvement"),
    ]


def test_a_cell_that_is_gone_is_missing_and_a_new_one_is_not(tmp_path: Path) -> None:
    history = history_of(tmp_path, None, 1, 1, None, None)
    assert steps_of(history, "status") == [("ok", "missing", "regression")]
    (series,) = history.series(metric="status", cell="a")
    assert [step.commit_range for step in history.assess(series).steps] == [
        f"{commit(2).short}..{commit(3).short}"
    ]


def test_what_another_machine_does_not_run_is_not_missing(tmp_path: Path) -> None:
    for number in range(4):
        add_record(record(number, cell("a")), tmp_path)
        add_record(record(number, cell("b", exact=False), machine=OTHER), tmp_path)
    assert not any(a.steps for a in assessed(tmp_path))


def test_a_regression_stands_until_it_is_undone(tmp_path: Path) -> None:
    history = history_of(tmp_path / "1", 1, 1.5, 1.2)
    (series,) = history.series(metric="step_time_s")
    assert [step.after for step in history.assess(series).regressions] == [1.5]
    for number, sent in enumerate((1000, 1001, 1000)):  # which has no tolerance
        add_record(record(number, cell("a", sent_bytes=sent)), tmp_path / "4")
    (found,) = assessed(tmp_path / "4", metric="sent_bytes")
    assert (len(found.steps), found.fails) == (2, False)
    # within the tolerance of simulated times: the last level is as good as before
    history = history_of(tmp_path / "3", 1, 1.5, 1 + 5e-7)
    (series,) = history.series(metric="step_time_s")
    assert not history.assess(series).fails
    history = history_of(tmp_path / "2", 1, 1.5, 1)
    (series,) = history.series(metric="step_time_s")
    assert len(history.assess(series).steps) == 2
    assert not history.assess(series).fails


@tabled(__file__, "a_step_that_was_meant_does_not_fail")
def test_a_step_that_was_meant_does_not_fail(tmp_path: Path, entry: str, is_meant: bool) -> None:
    text = f"meant: [{{commit: '{commit(1).short}', {entry}reason: more is computed}}]"
    (tmp_path / "meant.yaml").write_text(text)
    history = history_of(tmp_path, 1, 1.5, 1.5, 1.6)
    (series,) = history.series(metric="step_time_s")
    found = history.assess(series)
    assert [step.meant for step in found.steps] == ["more is computed" if is_meant else "", ""]
    assert len(found.regressions) == (1 if is_meant else 2)


@pytest.mark.parametrize("value", [0.9, 1.1])
def test_a_target_is_met_or_missed(tmp_path: Path, value: float) -> None:
    (tmp_path / "targets.yaml").write_text(f"targets: [{{cell: a, metric: step_time_s, value: {value}}}]")
    history = history_of(tmp_path, 1.2, 1)
    found = {series.metric.name: history.assess(series) for series in history.series(cell="a")}
    assert found["step_time_s"].fails == (value == 0.9)
    assert [target.value for target in found["step_time_s"].missed] == ([0.9] if value == 0.9 else [])
    assert not found["status"].targets


def test_one_bad_night_misses_no_target(tmp_path: Path) -> None:
    (tmp_path / "targets.yaml").write_text("targets: [{metric: step_time_s, value: 0.12}]")
    for number, seconds in enumerate([0.1, 0.1, 0.1, 0.5]):
        add_record(record(number, cell("a", exact=False, step_time_s=[seconds] * 3)), tmp_path)
    assert not any(a.fails for a in assessed(tmp_path))


def test_targets_that_are_a_link_to_nothing_are_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "targets.yaml").symlink_to("gone.yaml")
    with pytest.raises(UserError, match=r"targets\.yaml"):
        read_entries(tmp_path / TARGETS_FILE, Target)


@tabled(__file__, "a_wrong_file_is_one_line")
def test_a_wrong_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    add_record(record(0, cell("a")), tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_history(tmp_path)
    assert str(tmp_path / name) in str(error.value)


def test_commits_are_in_the_order_of_their_dates_and_of_one_branch(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        add_record(record(number, cell("a", sent_bytes=number)), tmp_path)
    add_record(record(1, cell("a", sent_bytes=9), branch="topic"), tmp_path)
    history = read_history(tmp_path)
    assert history.branches == ["main", "topic"]
    (series,) = history.series(metric="sent_bytes")
    assert [point.value for point in series.points] == [0, 1, 2]
    (series,) = history.series(metric="sent_bytes", branch="topic")
    assert [point.value for point in series.points] == [9]


def test_records_of_one_commit_are_one_point(tmp_path: Path) -> None:
    for hour, (seconds, sent) in enumerate([(0.1, 1), (0.2, 1), (0.3, 2)]):
        cells = [cell("a", exact=False, step_time_s=[seconds, seconds]), cell("b", sent_bytes=sent)]
        add_record(replace(record(0, *cells), date=f"2026-01-02T0{hour}:00:00+00:00"), tmp_path)
    points = {series.metric.name: series.points for series in read_history(tmp_path).series()}
    assert [(p.value, p.samples) for p in points["step_time_s"]] == [(0.2, (0.1, 0.1, 0.2, 0.2, 0.3, 0.3))]
    assert [point.value for point in points["sent_bytes"]] == [2]


def test_what_else_changed_is_said(tmp_path: Path) -> None:
    add_record(record(0, cell("a", sent_bytes=1)), tmp_path)
    machine, versions = {**MACHINE, "gpu_driver": "550"}, {"torch": "2.14.0", "spbench": "0.1.0"}
    add_record(record(1, cell("a", sent_bytes=2), machine=machine, versions=versions), tmp_path)
    (step,) = (step for a in assessed(tmp_path) for step in a.steps)
    assert step.also_changed == {"torch": ("2.13.0", "2.14.0"), "gpu_driver": (None, "550")}


@tabled(__file__, "an_unknown_name_is_an_error")
def test_an_unknown_name_is_an_error(tmp_path: Path, chosen: dict[str, str], message: str) -> None:
    add_record(record(0, cell("a", sent_bytes=1)), tmp_path)
    with pytest.raises(UserError, match=message):
        read_history(tmp_path).series(**chosen)


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
