"""Why a number changed: the part of the step, the messages, what is held, or the reason of a status."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.row import finite
from spbench.bench.tools.changes.change_evidence import why
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.judgement_report import grouped, shown_pair
from spbench.bench.tools.changes.metrics import TABLES
from spbench.bench.tools.changes.result_files import Results
from tests.cells import make_cell

Row = dict[str, Any]


@pytest.fixture(scope="module")
def row() -> Row:
    """A traced and simulated step with messages across nodes."""
    sizes = {"dp": 2, "sp": 2}
    cell = make_cell("causal-transformer-tiny", "ulysses", sizes, 2, 8, "fp32", cluster="piz-daint-p100")
    return finite(as_row(cell, measure(run_cell, cell)))


def test_the_parts_of_a_step_add_up_to_it(row: Row) -> None:
    """So that what moved explains the whole change."""
    measured = row["measurement"]
    seconds = {**measured["breakdown"], **measured["parts"]}
    assert sum(TABLES.record("parts of step_time_s", seconds).values()) == pytest.approx(
        measured["step_time_s"]
    )


def longer(measured: Row) -> None:
    measured["step_time_s"] += 8e-7
    measured["parts"]["memory_bound_s"] += 8e-7


def more_sent(measured: Row) -> None:
    for entry in measured["communication"]:
        if (entry["collective"], entry["phase"]) == ("all_to_all", "backward"):
            entry["sent_bytes"] += 4096


def more_held(measured: Row) -> None:
    measured["peak_memory_bytes"] += 5 * 2**20
    measured["peak_held"]["activations"] += 6 * 2**20
    measured["peak_held"]["temporaries"] -= 2**20


def later(measured: Row) -> None:
    more_held(measured)
    measured["peak_phase"] = "another phase"


def more_reserved(measured: Row) -> None:
    measured["reserved_memory_bytes"] += 2 * 2**20


@pytest.mark.parametrize(
    ("change", "quantity", "text"),
    [
        (longer, "step_time_s", "memory-bound operators +0.800 us"),
        (more_sent, "sent_bytes", "all_to_all in backward over sp +4.00 KiB"),
        (more_held, "peak_memory_bytes", "activations +6.00 MiB, temporaries -1.00 MiB"),
        (later, "peak_memory_bytes", "; the peak is in another phase, was in "),
        (more_reserved, "reserved_memory_bytes", "reserved beside it +2.00 MiB"),
    ],
)
def test_what_moved_is_named(row: Row, change: Callable[[Row], None], quantity: str, text: str) -> None:
    new = copy.deepcopy(row)
    change(new["measurement"])
    assert text in why(quantity, row, new).text
    assert why(quantity, row, row).text == ""


def test_the_reason_of_a_status_stands_beside_it(row: Row) -> None:
    new = {**copy.deepcopy(row), "status": "mismatch", "reason": "forward all_to_all on rank 0: ..."}
    new["measurement"]["formula_difference"] = [
        {
            "phase": "forward",
            "collective": "all_to_all",
            "metered_bytes": 462422016,
            "formula_bytes": 264241152,
        }
    ] * 2
    text = "all_to_all in forward: 462,422,016 bytes sent, 264,241,152 by the closed form (and 1 more)"
    assert why("status", row, new) == (("ok -> mismatch",), text)
    assert why("status", new, row) == (("mismatch -> ok",), f"was: {text}")
    full = {**row, "status": "oom", "reason": "no room for 2 MiB", "measurement": {}}
    assert why("status", row, full).text == "no room for 2 MiB"


def test_the_probes_of_a_search_say_why_its_answer_moved(row: Row) -> None:
    proofs = [
        [{"value": 64, "status": status, "peak_memory_bytes": 2**30 * peak, "reason": reason}]
        for status, peak, reason in (("ok", 3, ""), ("oom", 4, "no room"))
    ]
    base, new = ({**row, "measurement": {"proof": proof}} for proof in proofs)
    assert why("answer", base, new).text == "at 64: ok (3.00 GiB) -> oom (4.00 GiB)"
    other = {**row, "measurement": {"proof": [{"value": 60, "status": "oom", "reason": "no room; try less"}]}}
    assert why("answer", base, other).text == "at 60: no room"
    assert why("answer", {"measurement": {}}, {"measurement": {}}).text == ""


def test_cells_of_a_strategy_that_changed_alike_are_one_line(row: Row) -> None:
    """The line says the worst of them, and how many there are; another strategy or cause is a line of its
    own."""
    strategies = [*["ulysses"] * 3, "dsp"]
    base = {
        f"{number}": {**copy.deepcopy(row), "cell": {**row["cell"], "strategy": strategy}}
        for number, strategy in enumerate(strategies)
    }
    new = copy.deepcopy(base)
    for key, change in zip(new, (longer, longer, more_sent, longer), strict=True):
        change(new[key]["measurement"])
    found = judge(*(Results(None, rows) for rows in (base, new)))  # type: ignore[arg-type]
    lines = [
        tuple(map(g.get, ("strategy", "quantity", "cells", "where"))) for g in grouped(found.differences)
    ]
    assert sorted(lines) == [
        ("dsp", "step time", 1, "3"),
        ("ulysses", "sent", 1, "2"),
        ("ulysses", "step time", 2, "0 and 1 more"),
    ]


@pytest.mark.parametrize(
    ("base", "new", "unit", "text"),
    [
        (0.000115618, 0.000116424, "s", "115.6 us -> 116.4 us (+0.697%)"),
        (264241152, 462422016, "bytes", "252 MiB -> 441 MiB (+75.0%)"),
        (2**34, 2**34 + 1, "bytes", "17,179,869,184 bytes -> 17,179,869,185 bytes"),
        (1000, 999, "bytes", "1,000 bytes -> 999 bytes (-0.100%)"),
        (1984, 1968, "", "1,984 -> 1,968 (-0.806%)"),
        (0, 3, "count", "0 count -> 3 count"),
        (0.01, 0.0125, "%", "1.00% -> 1.25%"),
        (1.5, float("nan"), "s", "1.50 s -> nan"),
        ("ok", "oom", "", "ok -> oom"),
    ],
)
def test_values_have_the_digits_that_tell_them_apart(base: Any, new: Any, unit: str, text: str) -> None:
    assert shown_pair(base, new, unit) == text
