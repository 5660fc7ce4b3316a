"""The gate: worse is said and is exit code 1, whatever does not matter is passed over, and baselines."""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cli import exit_code
from spbench.bench.commands.baseline import FOLDER
from spbench.bench.config.scenario import load_scenario
from spbench.bench.errors import UserError
from spbench.bench.published.comparison import Comparison, write
from spbench.bench.regressions.judgement import judge
from spbench.bench.regressions.result_files import read_results
from tests.bench.commands.test_cli import sweep_here
from tests.bench.fakes import SCENARIO

Change = Callable[[list[dict[str, Any]]], Any]


def row(name: str, **measured: Any) -> dict[str, Any]:
    sent = [{"phase": "forward", "sent_bytes": 0.1}, {"phase": "backward", "sent_bytes": 0.2}]
    sent += [{"phase": "gradient_sync", "sent_bytes": 0.3}]
    measurement = {
        "peak_memory_bytes": 1000,
        "reserved_memory_bytes": 2000,
        "step_time_s": 2.0,
        "answer": 64,
        "communication": sent,
        "formula_difference": [],
    }
    return {
        "key": name,
        "cell": {"engine": "distributed" if "gloo" in name else "virtual"},
        "status": "ok",
        "reason": "",
        "measurement": measurement | measured,
        "elapsed_s": 1.5,
        "time": "2026-01-01T00:00:00+00:00",
        "provenance": {"host": "here", "commit": "a"},
    }


ROWS = [row("a"), row("b"), row("c/gloo")]
ENTRY = Comparison(
    claim="ratio",
    published=2.0,
    reproduced=2.2,
    relative_error=0.1,
    role="predicted",
    note="",
    variant="v",
    numerator="a",
    denominator="b",
)
TABLE = Comparison(
    **{**vars(ENTRY), "claim": "table", "denominator": "", "published": None, "reproduced": None}
    | {"relative_error": None, "status_published": "oom", "status_reproduced": "oom"}
)


def folder(path: Path, rows: list[dict[str, Any]], *entries: Comparison) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(entries or (ENTRY, TABLE), path)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", ROWS)


@pytest.fixture
def changed(tmp_path: Path, base: Path) -> Callable[[Change], list[tuple[str, str, str]]]:
    """What the gate says, worst first, when a change is made to the rows."""

    def judged(change: Change) -> list[tuple[str, str, str]]:
        rows = copy.deepcopy(ROWS)
        change(rows)
        found = judge(read_results(base), read_results(folder(tmp_path / "new", rows)))
        assert found.fails == any(d.verdict in ("worse", "missing") for d in found.differences)
        return [(d.verdict, d.where, d.quantity) for d in found.differences]

    return judged


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


def set_(index: int, name: str, value: Any) -> Change:
    return lambda rows: rows[index]["measurement"].update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_(0, "peak_memory_bytes", 1001), ("worse", "a", "peak_memory_bytes")),
        (set_(0, "peak_memory_bytes", 999), ("better", "a", "peak_memory_bytes")),
        (set_(0, "peak_memory_bytes", None), ("missing", "a", "peak_memory_bytes")),
        (set_(1, "reserved_memory_bytes", 2001), ("worse", "b", "reserved_memory_bytes")),
        (set_(1, "answer", 63), ("worse", "b", "answer")),
        (set_(1, "answer", 65), ("better", "b", "answer")),
        (set_(1, "answer", None), ("missing", "b", "answer")),
        (set_(1, "step_time_s", 2.00001), ("worse", "b", "step_time_s")),
        (set_(1, "step_time_s", 1.9), ("better", "b", "step_time_s")),
        (set_(2, "communication", [{"sent_bytes": 0.61}]), ("worse", "c/gloo", "sent_bytes")),
        (set_(2, "communication", []), ("better", "c/gloo", "sent_bytes")),
        (set_(0, "formula_difference", [{}]), ("worse", "a", "formula_differences")),
        (lambda rows: rows[0].update(status="oom"), ("worse", "a", "status")),
        (lambda rows: rows[0].update(status="failed", measurement={}), ("worse", "a", "status")),
        (lambda rows: rows.pop(1), ("missing", "b", "cell")),
        (lambda rows: rows.append(row("d")), ("new", "d", "cell")),
    ],
)
def test_each_change_is_said(changed: Any, change: Change, said: tuple[str, str, str]) -> None:
    assert changed(change) == [said]


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
    assert 'message="not judged in full; 1 measured metric not judged: base is of' in capsys.readouterr().out


def test_what_was_not_run_is_said(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        folder(tmp_path / "bases" / name, ROWS)
    words = [str(folder(tmp_path / "one", ROWS)), "--base", str(tmp_path / "bases")]
    for system, text in (("markdown", "**Not run:** two."), ("junit", 'message="not run"')):
        assert exit_code(["export", "--to", system, *words]) == 0
        assert text in capsys.readouterr().out


def test_worst_first(changed: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["measurement"] |= {"peak_memory_bytes": 1100, "answer": 128}
        rows[1]["measurement"] |= {"peak_memory_bytes": 1500}
        rows[2]["status"] = "oom"
        rows.append(row("d"))

    assert [said[:2] for said in changed(change)] == [
        *[("worse", "c/gloo"), ("worse", "b"), ("worse", "a"), ("better", "a"), ("new", "d")]
    ]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"relative_error": -0.1}, None),  # the same absolute error
        ({"relative_error": 0.1 + 5e-7, "note": "another", "reproduced": 3.0, "role": "calibrated"}, None),
        ({"relative_error": -0.2}, "worse"),
        ({"relative_error": 0.05}, "better"),
        ({"relative_error": None, "reproduced": None}, "missing"),
        ({"claim": "another"}, "missing"),
    ],
)
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


def test_published_statuses(tmp_path: Path, base: Path) -> None:
    fits = Comparison(**{**vars(TABLE), "status_reproduced": "ok", "note": "published oom, ours ok"})
    other = folder(tmp_path / "new", ROWS, ENTRY, fits)
    assert [(d.verdict, d.quantity) for d in judge(read_results(base), read_results(other)).differences] == [
        ("worse", "published status")
    ]
    assert not judge(read_results(other), read_results(base)).fails


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


def test_formats(tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = copy.deepcopy(ROWS)
    rows[0]["measurement"]["peak_memory_bytes"] = 1100
    rows[1]["measurement"]["answer"] = 65
    new = folder(tmp_path / "new", rows)
    assert exit_code(["compare", str(base), str(new)]) == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if "peak_memory_bytes" in line)
    assert [word.strip() for word in first.split("|")[1:-1]] == [
        *("worse", "peak_memory_bytes", "1000", "1100", "+10.000%", "a")
    ]
    assert lines[-1] == "WORSE: 1 worse, 1 better, 0 cells equal, 2 claims equal, 1 not judged in full"
    assert exit_code(["compare", str(base), str(new), "--format", "json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["fails"], len(content["differences"])) == (True, 2)
    assert exit_code(["compare", str(base), str(new), "--format", "csv"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[0].startswith("verdict,where,quantity,base,new,change")
    assert output.out.splitlines()[1] == "worse,a,peak_memory_bytes,1000,1100,0.1,False,,"
    assert output.err.splitlines()[-1].startswith("WORSE")


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


# -- baselines -------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with small.yaml, whose cells are made up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spbench.bench.sweep.sweep.sweep", sweep_here)
    Path("small.yaml").write_text(SCENARIO)
    return Path("results/baseline/small")


BASELINE = ["baseline", "--scenario", "small.yaml"]


def test_a_baseline_is_the_same_bytes_each_time(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(BASELINE) == 0
    assert capsys.readouterr().out.splitlines() == [str(small / "cells.jsonl"), str(small / "comparison.csv")]
    first = [(small / name).read_bytes() for name in ("cells.jsonl", "comparison.csv")]
    assert exit_code(BASELINE) == 0
    assert "running 5" in capsys.readouterr().err  # afresh
    assert [(small / name).read_bytes() for name in ("cells.jsonl", "comparison.csv")] == first
    rows = [json.loads(line) for line in first[0].splitlines()]
    keys = [row["key"] for row in rows]
    assert (keys, len(keys)) == (sorted(keys), 5)
    assert set(rows[0]) == {"key", "cell", "status", "reason", "measurement"}
    assert "step_time_samples_s" not in rows[0]["measurement"]
    assert exit_code([*BASELINE, "--resume"]) == 0
    assert "running" not in capsys.readouterr().err


def test_a_run_is_not_worse_than_its_baseline(small: Path) -> None:
    assert exit_code(BASELINE) == 0
    assert exit_code(["run", "--scenario", "small.yaml", "--fresh"]) == 0
    assert exit_code(["compare", str(small), "results/runs/small"]) == 0
    assert exit_code(["run", "--scenario", "small.yaml", "--output", "part", "--world-size", "8"]) == 0
    assert exit_code(["compare", str(small), "part", "--subset"]) == 0
    assert exit_code(["compare", str(small), "part"]) == 1


def test_failures_make_no_baseline(small: Path) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("sp: [1, 4, 8]", "sp: [1, 4, 8, 5]"))
    assert exit_code(BASELINE) == 1  # five ranks are a fault
    assert not small.exists()
    assert exit_code(["baseline"]) == 2
    assert exit_code([*BASELINE, "--variant", "x"]) == 2


def test_baselines_are_of_virtual_ranks(small: Path) -> None:
    Path("small.yaml").write_text(SCENARIO.replace("defaults:", "defaults:\n  engine: distributed"))
    assert exit_code(BASELINE) == 0
    rows = read_results(small).cells.values()
    assert {row["cell"]["engine"] for row in rows} == {"virtual"}


def test_the_committed_baseline_is_of_the_gate_as_it_is() -> None:
    """Every cell of scenarios/gate.yaml, and no other, is in results/baseline/gate."""
    keys = {cell.key for cell in load_scenario("gate").cells[""]}
    assert read_results(Path(__file__).parents[3] / FOLDER / "gate").cells.keys() == keys
