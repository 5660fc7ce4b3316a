"""What is said of rows beside those of before; of whatever does not matter, nothing."""

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import Comparison
from tests.tools.changes.rows import ENTRY, ROWS, TABLE, Change, row
from tests.tools.changes.rows import judged_folder as folder


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_(0, "peak_memory_bytes", 1001), ("worse", "a", "peak_memory_bytes")),
        (set_(0, "peak_memory_bytes", 999), ("better", "a", "peak_memory_bytes")),
        (set_(0, "peak_memory_bytes", None), ("missing", "a", "peak_memory_bytes")),
        (set_(1, "reserved_memory_bytes", 2001), ("worse", "b", "reserved_memory_bytes")),
        (set_(1, "answer", 63), ("worse", "b", "answer")),
        (set_(1, "answer", 65), ("better", "b", "answer")),
        # numbers of another answer are not judged
        (set_(1, peak_memory_bytes=1, step_time_s=1.0), ("worse", "b", "answer")),
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
