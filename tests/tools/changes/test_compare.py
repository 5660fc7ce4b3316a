"""spbench compare: worse is exit code 1, and files that cannot be read are one line; the committed rows that
later runs are held against. What is said of rows beside those of before; of whatever does not matter,
nothing. Changes of level are found where they were planted, and in noise there are none.
"""

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.changes.baseline_command import FOLDER
from spbench.bench.tools.changes.change_points import MINIMUM_EFFECT, ChangePoint, _doubt, change_points
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import Comparison
from tests.bench.fakes import SCENARIO
from tests.grid import tabled
from tests.tools.changes.rows import ENTRY, ROWS, TABLE, Change, row
from tests.tools.changes.rows import judged_folder as folder
from tests.tools.commands.conftest import Run


def damaged(path: Path, field: str, text: str) -> Path:
    """Results in which the first number of a field is written as this text."""
    place = folder(path, ROWS)
    rows = (place / "cells.jsonl").read_text()
    (place / "cells.jsonl").write_text(re.sub(rf'("{field}": \[?)[0-9.]+', rf"\g<1>{text}", rows, count=1))
    return place


@pytest.mark.parametrize("field", ["peak_memory_bytes", "step_time_s", "answer", "sent_bytes"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_worse_in_new_and_an_error_in_base(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], field: str, text: str
) -> None:
    spoilt = damaged(tmp_path / "new", field, text)
    assert exit_code(["compare", str(base), str(spoilt), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert [(d["verdict"], d["where"], d["quantity"].split(".")[-1], d["new"]) for d in found] == [
        ("worse", "a", field, None)
    ]
    assert exit_code(["compare", str(spoilt), str(base)]) == 2
    assert "cells.jsonl:1: not a result row" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-1", "true", '"5"', "1" + "0" * 400, "[]"])
def test_a_number_that_cannot_be_is_never_better(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    spoilt = damaged(tmp_path / "new", "peak_memory_bytes", text)
    for pair in ((base, spoilt), (spoilt, base)):
        assert exit_code(["compare", *map(str, pair)]) == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), "cells.jsonl:1: " in error) == (1, True)
        assert "measurement.peak_memory_bytes: " in error


def test_an_error_that_is_not_finite_is_worse(tmp_path: Path, base: Path) -> None:
    place = folder(tmp_path / "new", ROWS)
    text = (place / "comparison.csv").read_text()
    (place / "comparison.csv").write_text(text.replace("0.1,", "nan,"))
    differences = judge(read_results(base), read_results(place, judged=True)).differences
    assert [(d.verdict, d.where, d.quantity) for d in differences] == [("worse", "ratio v", "error")]
    with pytest.raises(UserError, match="relative_error: 'nan' is no finite number"):
        read_results(place)


def test_nothing_judged_is_not_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same cells, timed on two machines."""
    places = []
    for host in ("here", "there"):
        measurement = {"step_time_s": 1.0, "step_time_samples_s": [1.0] * 5}
        entry = {**row("c/gloo"), "measurement": measurement, "provenance": {"host": host}}
        places.append(folder(tmp_path / host, [entry]))
        (places[-1] / "comparison.csv").unlink()
    assert exit_code(["compare", *map(str, places)]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "NOT JUDGED: 0 cells equal, 1 not judged in full"
    assert exit_code(["export", "--to", "markdown", str(places[1]), "--base", str(places[0])]) == 0
    assert "## spbench: not judged" in capsys.readouterr().out
    assert exit_code(["export", "--to", "junit", str(places[1]), "--base", str(places[0])]) == 0
    assert 'message="not judged in full; 1 measured metric not judged: base was' in capsys.readouterr().out


def test_what_was_not_run_is_said(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        folder(tmp_path / "bases" / name, ROWS)
    words = [str(folder(tmp_path / "one", ROWS)), "--base", str(tmp_path / "bases")]
    for system, text in (("markdown", "**Not run:** two."), ("junit", 'message="not run"')):
        assert exit_code(["export", "--to", system, *words]) == 0
        assert text in capsys.readouterr().out


def test_a_subset_may_lack_cells_and_their_claims(tmp_path: Path, base: Path) -> None:
    part = folder(tmp_path / "new", ROWS[:1], Comparison(**{**vars(ENTRY), "relative_error": None}))
    assert exit_code(["compare", str(base), str(part)]) == 1
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 1  # of the table, the cell is there
    part = folder(tmp_path / "new", ROWS[:1], Comparison(**{**vars(ENTRY), "relative_error": None}), TABLE)
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 0
    rows = copy.deepcopy(ROWS[:1])
    rows[0]["measurement"]["answer"] = 1
    part = folder(tmp_path / "new", rows, TABLE)
    assert exit_code(["compare", str(base), str(part), "--subset"]) == 1


def test_files_without_a_comparison(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["compare", str(base / "cells.jsonl"), str(base)]) == 0
    assert exit_code(["compare", str(base), str(base / "cells.jsonl")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == out[3:]
    assert "errors against published numbers are not judged" in out[0]
    assert out[1] == "note: 2 measured metrics not judged: there are no samples"
    assert out[2] == "not worse: 2 cells equal, 3 not judged in full"
    (other := folder(tmp_path / "new", ROWS)).joinpath("comparison.csv").unlink()
    assert exit_code(["compare", str(base), str(other)]) == 1  # a folder should have it


def unreadable(path: Path) -> Iterator[tuple[Path, str]]:
    yield path / "absent", "no such file"
    yield folder(path / "empty", []), "has no rows"
    cut = folder(path / "cut", ROWS) / "cells.jsonl"
    cut.write_text(cut.read_text()[:-9])
    yield cut.parent, "cells.jsonl:3: not a result row; mend or remove the line"
    (spoilt := folder(path / "spoilt", ROWS)).joinpath("comparison.csv").write_text("claim,published\nx,1\n")
    yield spoilt, "no column 'variant'"
    (words := folder(path / "words", ROWS)).joinpath("comparison.csv").write_bytes(b"\xff\xfe")
    yield words, "comparison.csv"
    text = (folder(path / "number", ROWS) / "comparison.csv").read_text()
    (path / "number" / "comparison.csv").write_text(text.replace("0.1", "a tenth"))
    yield path / "number", "row 1: relative_error: 'a tenth' is no finite number"


def test_unreadable_files_are_one_line(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, message in unreadable(tmp_path):
        for pair in ((base, path), (path, base)):
            assert exit_code(["compare", *map(str, pair)]) == 2
            output = capsys.readouterr()
            assert (output.out, output.err.count("\n")) == ("", 1)
            assert message in output.err
    with pytest.raises(UserError, match="no such file"):
        read_results(tmp_path / "absent")


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


def test_nothing_is_said_of_what_does_not_matter(changed: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for entry in rows:
            entry |= {"elapsed_s": 99.0, "time": "later", "provenance": {"host": "there"}, "reason": "words"}
            entry["measurement"]["peak_phase"] = "backward"
            entry["measurement"]["communication"].reverse()  # 0.3 + 0.2 + 0.1 is not 0.1 + 0.2 + 0.3
        del rows[0]["elapsed_s"], rows[0]["provenance"]
        rows[1]["measurement"]["step_time_s"] *= 1 + 5e-7
        rows[2]["measurement"] |= {
            "step_time_s": 9.0,
            "peak_memory_bytes": 9000,
            "reserved_memory_bytes": None,
        }
        rows.reverse()
        rows.insert(0, {**rows[0], "status": "failed", "measurement": {}})  # the last of a key counts

    assert changed(change) == []


def set_(index: int, name: str = "answer", value: Any = 63, **further: Any) -> Change:
    return lambda rows: rows[index]["measurement"].update({name: value, **further})


@tabled(__file__, "each_change_is_said")
def test_each_change_is_said(changed: Any, change: list[Any], said: list[str]) -> None:
    assert changed(set_(*change)) == [(*said,)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        # numbers of another answer are not judged
        (set_(1, peak_memory_bytes=1, step_time_s=1.0), ("worse", "b", "answer")),
        (lambda rows: rows[0].update(status="oom"), ("worse", "a", "status")),
        (lambda rows: rows[0].update(status="failed", measurement={}), ("worse", "a", "status")),
        (lambda rows: rows.pop(1), ("missing", "b", "cell")),
        (lambda rows: rows.append(row("d")), ("new", "d", "cell")),
    ],
)
def test_each_change_of_rows_is_said(changed: Any, change: Change, said: tuple[str, str, str]) -> None:
    assert changed(change) == [said]


def test_what_the_base_lacks_is_said_and_not_judged(tmp_path: Path) -> None:
    """A metric of real ranks too, of which nothing would be said otherwise."""
    rows = copy.deepcopy(ROWS)
    for number in (0, 1, 2):
        del rows[number]["measurement"]["peak_memory_bytes"]
    del rows[0]["measurement"]["step_time_s"]
    damaged = read_results(folder(tmp_path / "damaged", rows))
    new = read_results(folder(tmp_path / "new", ROWS))
    (note,) = [each for each in judge(damaged, new).notes if "lacks metrics" in each]
    assert note.endswith("so that they are not judged: peak_memory_bytes (3 cells), step_time_s (1 cell)")
    assert not any("lacks metrics" in each for each in judge(new, new).notes)


def test_a_row_of_the_base_without_a_measurement_is_refused(tmp_path: Path, base: Path) -> None:
    rows = copy.deepcopy(ROWS)
    rows[1]["measurement"] = {}
    empty = read_results(folder(tmp_path / "empty", rows))
    with pytest.raises(UserError, match="empty: the row b is ok and its measurement is empty"):
        judge(empty, read_results(base))
    assert judge(read_results(base), empty).fails


def test_worst_first(changed: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["measurement"] |= {"formula_difference": [{}], "answer": 128}
        rows[1]["measurement"] |= {"peak_memory_bytes": 1500}
        rows[2]["status"] = "oom"
        rows.append(row("d"))

    assert [said[:2] for said in changed(change)] == [
        *[("worse", "a"), ("worse", "c/gloo"), ("worse", "b"), ("better", "a"), ("new", "d")]
    ]


@tabled(__file__, "errors_against_published_numbers")
def test_errors_against_published_numbers(
    tmp_path: Path, base: Path, changes: dict[str, Any], verdict: str | None
) -> None:
    entry = Comparison(**{**vars(ENTRY), **changes})
    found = judge(read_results(base), read_results(folder(tmp_path / "new", ROWS, entry, TABLE)))
    assert [d.verdict for d in found.differences][:1] == ([verdict] if verdict else [])
    assert found.fails == (verdict in ("worse", "missing"))
    # a subset that has the claim's cells must have the claim
    again = judge(read_results(base), read_results(tmp_path / "new"), subset=True)
    assert again.fails == found.fails


def test_a_cell_that_has_no_number_any_more_is_told_once(tmp_path: Path, base: Path) -> None:
    rows = copy.deepcopy(ROWS)
    wrong = next(row for row in rows if row["key"] == ENTRY.numerator)
    wrong |= {"status": "mismatch", "measurement": {}}
    without = replace(ENTRY, reproduced=None, relative_error=None, status_reproduced="mismatch")
    found = judge(read_results(base), read_results(folder(tmp_path / "new", rows, without, TABLE)))
    assert {(d.verdict, d.quantity) for d in found.differences} <= {
        ("worse", "status"),
        ("worse", "published status"),
    }
    assert found.differences[0].where == ENTRY.numerator


def test_published_statuses(tmp_path: Path, base: Path) -> None:
    fits = Comparison(**{**vars(TABLE), "status_reproduced": "ok", "note": "published oom, ours ok"})
    other = folder(tmp_path / "new", ROWS, ENTRY, fits)
    assert [(d.verdict, d.quantity) for d in judge(read_results(base), read_results(other)).differences] == [
        ("worse", "published status")
    ]
    assert not judge(read_results(other), read_results(base)).fails


def test_never_cries_wolf(tmp_path: Path, base: Path) -> None:
    """Shuffled rows and entries of many cells are equal."""
    chance = random.Random(1)
    rows = [
        row(f"cell {n}", communication=[{"sent_bytes": chance.random() * 10 ** chance.randrange(9)}] * 3)
        for n in range(50)
    ]
    for entry in rows:
        entry["measurement"]["communication"] += [{"sent_bytes": chance.random()} for _ in range(20)]
    first = read_results(folder(tmp_path / "first", rows))
    shuffled = copy.deepcopy(rows)
    chance.shuffle(shuffled)
    for entry in shuffled:
        chance.shuffle(entry["measurement"]["communication"])
    found = judge(first, read_results(folder(tmp_path / "second", shuffled, TABLE, ENTRY)))
    assert (found.differences, found.equal) == ([], {"cells": 50, "claims": 2})


COMMITS = 60
NOISES = (0.01, 0.015, 0.02, 0.03)


def nights(generator: np.random.Generator, noise: float, commits: int = COMMITS) -> NDArray[np.float64]:
    """Medians of 9 samples a night, each with that relative noise, and all with a third of it in common."""
    samples = generator.normal(0, noise, (commits, 9)) + generator.normal(0, noise / 3, (commits, 1))
    return np.median(0.2 * np.exp(samples), axis=1)


def stepped(generator: np.random.Generator, noise: float, place: int, factor: float) -> list[ChangePoint]:
    values = nights(generator, noise)
    values[place:] *= factor
    return change_points(values.tolist())


@pytest.mark.parametrize("factor", [1.05, 0.95])
@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("place", [9, 30, 52])
def test_a_planted_step_is_found_and_no_other(noise: float, place: int, factor: float) -> None:
    for seed in range(5):
        (found,) = stepped(np.random.default_rng(seed), noise, place, factor)
        assert found.last_before < place <= found.first_after
        assert found.first_after - found.last_before <= (1 if noise == 0.01 else 6)
        assert found.after / found.before == pytest.approx(factor, abs=0.02)
        assert not found.drift


def test_a_range_is_as_wide_as_noise_makes_it_uncertain() -> None:
    """Under 2% of noise the likeliest place of a step of 5% is often a wrong one, and the range holds the
    right one with 95% confidence."""
    generator = np.random.default_rng(4)
    holding = 0
    for _ in range(100):
        values = np.exp(generator.normal(0, 0.02, COMMITS))
        values[30:] *= 1.05
        holding += any(f.last_before < 30 <= f.first_after for f in change_points(values.tolist()))
    assert holding >= 95


def test_two_steps_are_told_apart() -> None:
    values = nights(np.random.default_rng(3), 0.01)
    values[20:40] *= 1.08
    found = change_points(values.tolist())
    assert [(change.last_before, change.first_after) for change in found] == [(19, 20), (39, 40)]


def test_noise_has_no_steps() -> None:
    generator = np.random.default_rng(7)
    for noise in (0.001, *NOISES, 0.1):
        for commits in (6, 9, 20, COMMITS):
            assert change_points(nights(generator, noise, commits).tolist()) == []


@pytest.mark.parametrize("place", [0, 1, 30, 58, 59])
@pytest.mark.parametrize("factor", [0.2, 1.3, 10])
def test_an_outlier_is_no_step_and_hides_none(place: int, factor: float) -> None:
    values = nights(np.random.default_rng(5), 0.01)
    values[place] *= factor
    assert change_points(values.tolist()) == []
    values[45:] *= 1.05
    (found,) = change_points(values.tolist())
    assert found.last_before < 45 <= found.first_after


def test_two_bad_nights_in_a_row_are_no_step() -> None:
    values = nights(np.random.default_rng(5), 0.01)
    values[58:] *= 1.3
    assert change_points(values.tolist()) == []


def test_a_step_shows_after_three_nights() -> None:
    (found,) = stepped(np.random.default_rng(1), 0.01, COMMITS - 3, 1.05)
    assert (found.last_before, found.first_after) == (COMMITS - 4, COMMITS - 3)


def test_a_drift_is_one_from_end_to_end() -> None:
    values = nights(np.random.default_rng(2), 0.01) * np.linspace(1, 1.12, COMMITS)
    (found,) = change_points(values.tolist())
    assert found.drift
    assert (found.last_before, found.first_after) == (0, COMMITS - 1)
    assert found.after / found.before == pytest.approx(1.12, abs=0.02)


def test_too_small_or_too_few_is_nothing() -> None:
    assert stepped(np.random.default_rng(0), 0.001, 30, 1.015) == []
    assert change_points([1.0, 1.0, 1.0, 2.0, 2.0]) == []
    assert change_points([0.0] * 10 + [1.0] * 10) == []


def test_values_without_noise() -> None:
    (found,) = change_points([2.0] * 10 + [2.1] * 10)
    assert (found.last_before, found.first_after, found.before) == (9, 10, pytest.approx(2.0))
    assert change_points([2.0] * 20) == []


@pytest.mark.slow
def test_false_alarms_and_planted_steps_in_many_series(capsys: pytest.CaptureFixture[str]) -> None:
    """At most one alarm in a thousand series of noise; of steps of 5%, 99% with the commit in their range."""
    generator = np.random.default_rng(11)

    def alarms(noise: float, commits: int) -> int:
        return sum(bool(change_points(nights(generator, noise, commits).tolist())) for _ in range(2000))

    false = {(noise, commits): alarms(noise, commits) for noise in NOISES for commits in (10, COMMITS, 200)}
    planted, others, right, widths = 0, 0, 0, []
    for noise in NOISES:
        for place in range(6, COMMITS - 5):
            for _ in range(40):
                found = stepped(generator, noise, place, 1.05)
                holding = [f for f in found if f.last_before < place <= f.first_after and not f.drift]
                planted, right = planted + 1, right + bool(holding)
                others += len(found) - len(holding)
                widths += [f.first_after - f.last_before for f in holding]
    with capsys.disabled():
        print(f"\nfalse alarms in 2000 series each, by noise and commits: {false}")
        print(f"{right} of {planted} steps, {others} others; ranges {np.percentile(widths, [50, 95, 100])}")
    assert sum(false.values()) <= 24
    assert right >= 0.99 * planted
    assert others <= 0.01 * planted


def between_nights(generator: np.random.Generator, kind: str) -> NDArray[np.float64]:
    """Medians that differ from night to night: by 3%; by 2%, each in part like the one before; or by 1%, with
    every tenth night slowed by some 10%."""
    if kind == "normal":
        return np.exp(generator.normal(0, 0.03, COMMITS))
    if kind == "skewed":
        slowed = (generator.random(COMMITS) < 0.1) * generator.exponential(0.1, COMMITS)
        return np.exp(generator.normal(0, 0.01, COMMITS) + slowed)
    logs = generator.normal(0, 0.02, COMMITS)
    for night in range(1, COMMITS):
        logs[night] += 0.3 * logs[night - 1]
    return np.exp(logs)


@pytest.mark.slow
def test_nights_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """Noise that is not as the search supposes: few series have a step, and fewer one that lasts.

    Where a tenth of the nights is slow, 5.6% of histories have three slow ones in a row: a step, and one
    back."""
    generator = np.random.default_rng(12)
    for kind, most, most_lasting in (("normal", 2, 2), ("skewed", 112, 20), ("correlated", 20, 20)):
        false, lasting, right = 0, 0, 0
        for _ in range(2000):
            found = change_points(between_nights(generator, kind).tolist())
            false += bool(found)
            lasting += bool(found) and abs(found[-1].after / found[0].before - 1) > MINIMUM_EFFECT
        for _ in range(400):
            values = between_nights(generator, kind)
            values[COMMITS // 2 :] *= 1.05
            right += any(f.last_before < 30 <= f.first_after for f in change_points(values.tolist()))
        with capsys.disabled():
            print(
                f"\n{kind}: {false} of 2000 series have a step, {lasting} a lasting one; {right} of 400 found"
            )
        assert false <= most
        assert lasting <= most_lasting
        assert right >= 0.75 * 400


def test_the_smallest_effect_that_counts_counts() -> None:
    smallest = math.log1p(MINIMUM_EFFECT)
    assert _doubt(np.zeros(8), np.full(8, smallest)) < 1e-6
    assert _doubt(np.zeros(8), np.full(8, 0.99 * smallest)) == 1
