"""Histories: series, their steps with the commits that made them, targets, and what was meant."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.history import (
    TARGETS_FILE,
    Assessment,
    History,
    Target,
    read_entries,
    read_history,
)
from spbench.bench.tools.changes.record_command import add_record
from tests.grid import tabled
from tests.tools.changes.records import MACHINE, OTHER, Cell, cell, commit, nightly, noisy, record

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
