"""Intervals of rows, as they are read and shown, ties among rows, and what is said of errors of memory."""

import json
from typing import Any

import pytest

from spbench.bench.command_line.shown_times import shown_band
from spbench.bench.measure.sweep.results import flat
from spbench.bench.measure.trust.bands import (
    PEAK,
    RESERVED,
    packaged_errors,
    packaged_model,
    past_errors,
    tied,
    with_band,
)
from spbench.bench.measure.trust.error_model import ANY, ErrorModel, Interval
from spbench.bench.setting_values import STAND_INS, StandIn

#: intervals of log errors of 0.1 and 0.5; ties up to 5%
MODEL = ErrorModel(
    intervals={
        ANY: {ANY: Interval(0, 0.5, 2, 2)},
        "sourced": {ANY: Interval(0, 0.1, 1, 1), "matmul": Interval(0, 0.1, 1, 1)},
        "datasheet": {ANY: Interval(-0.3, 0.4, 1, 1)},
    },
    strategies=["ulysses"],
    of_strategies=0.2,
    of_ties={ANY: 0.05},
    of_orders={},
    of_stand_ins={"DeepSpeed priced as fully_shard": Interval(-0.4, 0.3, 1, 4)},
)


def row(
    step_time_s: float | None = 2.0, cell: dict[str, Any] | None = None, **measured: Any
) -> dict[str, Any]:
    """A row of a simulated step."""
    asked = {
        "model": "m",
        "strategy": "ulysses",
        "sizes": {"sp": 4},
        "batch": 1,
        "seq_len": 64,
        **(cell or {}),
    }
    simulated = {"step_time_s": step_time_s, "rates": "sourced", "bound": "matmul", **measured}
    return {"key": json.dumps(asked), "cell": asked, "status": "ok", "measurement": simulated}


def test_a_simulated_time_has_an_interval_and_says_what_it_rests_on() -> None:
    measured = with_band(row(), MODEL)["measurement"]
    assert measured["step_time_low_s"] == pytest.approx(2 * 0.905, rel=1e-3)
    assert measured["step_time_high_s"] == pytest.approx(2 * 1.105, rel=1e-3)
    assert measured["band"] == "sourced rates, matmul: 1 source, 1 row"
    assert measured["step_time_s"] == 2.0


@pytest.mark.parametrize("without", [{"step_time_s": None}, {"bound": ""}, {"rates": ""}])
def test_other_rows_stay_as_they_are(without: dict[str, Any]) -> None:
    plain = row(**without)
    assert with_band(plain, MODEL) == plain


def test_rows_are_read_with_the_intervals_of_the_package() -> None:
    entry = flat(row())
    low, high, words = packaged_model().band("sourced", "matmul", "ulysses")
    assert (entry["step_time_low_s"], entry["step_time_high_s"]) == (2 * low, 2 * high)
    assert entry["band"] == words
    assert low <= 1 <= high


LACKING = {
    "priced_by": [
        {"work": "memory", "by": "the datasheet", "grade": "transferred", "share": 0.3},
        {"work": "forward attention by triton", "by": "matmuls", "grade": "substituted", "share": 0.2},
    ]
}


def test_a_row_names_the_rate_that_makes_its_class() -> None:
    lacking = row(rates="substituted", **LACKING)
    words = with_band(lacking, MODEL)["measurement"]["band"]
    cluster = lacking["cell"].get("cluster") or "this cluster"
    assert words.startswith(
        f"no rate of forward attention by triton on {cluster}, priced by matmuls; no measured"
    )
    # the table of `spbench run` and files have rows on one level
    assert shown_band(flat(lacking)).endswith(", no rate of forward attention by triton")
    assert (
        "triton" not in with_band(row(**LACKING), MODEL)["measurement"]["band"]
    )  # which has all that counts


def stood_in(*some: StandIn) -> dict[str, Any]:
    return {"rates": str(some[0]), "priced_by": [each.price for each in some]}


DEEPSPEED = stood_in(STAND_INS[1])


def test_a_row_names_the_program_that_another_stands_in_for() -> None:
    measured = with_band(row(**DEEPSPEED), MODEL)["measurement"]
    assert measured["lacks"] == "DeepSpeed"
    said = "DeepSpeed priced as fully_shard: 1 source, 4 rows; sourced rates, matmul: 1 source, 1 row"
    assert measured["band"] == said
    both = {**DEEPSPEED, "priced_by": [*DEEPSPEED["priced_by"], *LACKING["priced_by"]]}
    lacking = with_band(row(**both), MODEL)["measurement"]
    assert lacking["lacks"] == "DeepSpeed, forward attention by triton"


@pytest.mark.parametrize("missing", ["step_time_low_s", "step_time_high_s"])
def test_a_time_with_one_end_of_its_interval_stands_alone(missing: str) -> None:
    """As of a damaged row."""
    assert shown_band({**with_band(row(), MODEL)["measurement"], missing: None}) == "2.00 s"


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        ({}, "2.00 s ±11%"),
        ({"bound": "bubble"}, "2.00 s -50% +101%"),  # of no measured step: the widest of all
        ({"rates": "fitted"}, "2.00 s -50% +101%"),
        ({"rates": "fitted elsewhere"}, "2.00 s -50% +101%, fitted to others"),
        ({"rates": "substituted"} | LACKING, "2.00 s -50% +101%, no rate of forward attention by triton"),
        ({"rates": "datasheet", "bound": ANY}, "2.00 s -10% +101%, uncalibrated"),
        ({"rates": "", "bound": ""}, "2.00 s"),
        (DEEPSPEED, "2.00 s -10% +101%, DeepSpeed priced as fully_shard"),
        # no narrower than that of its rates, and of what was never measured as wide as others
        (DEEPSPEED | {"bound": "bubble"}, "2.00 s -50% +101%, DeepSpeed priced as fully_shard"),
        (stood_in(STAND_INS[2]), "2.00 s -50% +101%, expert parallelism, measured slower"),
        (stood_in(*STAND_INS[1:3]) | {"rates": "datasheet"}, "2.00 s -50% +101%, uncalibrated"),
        ({"step_time_s": None}, ""),
    ],
)
def test_a_time_is_shown_with_its_interval(measured: dict[str, Any], text: str) -> None:
    assert shown_band(with_band(row(**measured), MODEL)["measurement"]) == text


def test_times_that_differ_less_than_errors_do_are_ties() -> None:
    other = {"sizes": {"sp": 2, "dp": 2}, "batch": 2}
    rows = [row(2.0), row(2.09), row(2.2), row(4.1, other), row(1.0, {"seq_len": 32}), row(None)]
    assert tied(rows, MODEL) == [True, True, False, True, None, None]


def test_without_a_tie_the_fastest_is_alone() -> None:
    assert tied([row(2.0), row(3.0)], MODEL) == [False, False]


def test_recomputation_and_splits_are_of_one_run_and_other_models_are_not() -> None:
    plain, again = row(2.0), row(2.01, {"model_options": {"recompute": "full"}})
    deeper = row(2.01, {"model_options": {"layers": 8}})
    assert tied([plain, again, deeper], MODEL) == [True, True, None]


ERRORS = {"ddp": {PEAK: [-0.02, 0.0, 0.001, -0.00005]}, "zero3": {PEAK: [0.1]}}


def test_errors_of_a_backend() -> None:
    found = past_errors("ddp", PEAK, ERRORS)
    assert (found.rows, found.under, found.furthest_under, found.worst) == (4, 1, 0.02, 0.02)
    assert found.median == pytest.approx(0.000525)
    assert str(found) == (
        "peak of 4 measured numbers of the backend ddp: median error 0.05%, worst 2.0%, 1 too low by more "
        "than 0.01%, at most by 2.00%"
    )


def test_what_was_not_measured_has_the_errors_of_all() -> None:
    found = past_errors("zero1", PEAK, ERRORS)
    assert (found.rows, found.of) == (5, "all backends (none of zero1)")
    assert past_errors("zero1", RESERVED, ERRORS) is None


def test_the_package_has_errors() -> None:
    assert len(packaged_errors()["megatron"][PEAK]) > 100
