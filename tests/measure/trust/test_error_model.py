"""The error model on errors that were drawn or planted: what it covers, what widens it, what it says.
Verdicts on memory: what makes one tight, and the border that published runs give.
Intervals of rows, as they are read and shown, ties among rows, and what is said of errors of memory."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
from pandas import DataFrame

from spbench.bench.cell import Cell
from spbench.bench.command_line.record_forms import flat, shown_band
from spbench.bench.measure.trust import bands
from spbench.bench.measure.trust.error_model import ErrorModel, Interval
from spbench.bench.measure.trust.fit_certainty import Evidence, Filled, certainty, packaged_evidence
from spbench.bench.measurement import filled
from spbench.bench.setting_values import STAND_INS, StandIn
from spbench.bench.tools.papers import error_fits
from spbench.bench.tools.papers.error_fits import overall
from tests.grid import tabled

ANY = ErrorModel.ANY
SOURCES = [f"s{number}" for number in range(8)]


class StepObservation(NamedTuple):
    """A line of a frame of measured steps."""

    source: str
    rates: str
    bound: str
    strategy: str
    log_error: float
    alike: str = ""
    log_time: float = 0.0
    machine: str = ""
    kernel: str = ""
    unknown: float = 0.0


def framed(steps: Sequence[StepObservation]) -> DataFrame:
    return DataFrame(steps, columns=StepObservation._fields)


def fit(steps: Sequence[StepObservation]) -> ErrorModel:
    return error_fits.fit(framed(steps))


def coverage(steps: Sequence[StepObservation], what: error_fits.LeftOut = "source") -> DataFrame:
    return error_fits.coverage(framed(steps), what)


def drawn(
    seed: int,
    sources: Sequence[str] = SOURCES,
    *,
    rows: int = 20,
    between: float = 0.1,
    within: float = 0.05,
    mean: float = 0.0,
    rates: str = "sourced",
    bound: str = "matmul",
) -> list[StepObservation]:
    """Errors with an effect of their source and one of their own, both normal."""
    random = Random(seed)
    found = []
    for source in sources:
        effect = random.gauss(mean, between)
        found += [
            StepObservation(source, rates, bound, "a", effect + random.gauss(0, within)) for _ in range(rows)
        ]
    return found


#: a class of times with a stand-in
DEEPSPEED_AS_FSDP = "DeepSpeed priced as fully_shard"


def width(model: ErrorModel, rates: str = "sourced", bound: str = "matmul") -> float:
    low, high, _ = model.band(rates, bound, "a")
    return math.log(high / low)


def test_new_sources_lie_within_as_often_as_the_level_says() -> None:
    shares = [overall(coverage(drawn(seed))) for seed in range(40)]
    assert 0.75 < sum(shares) / len(shares) < 0.9


def test_a_biased_source_widens_the_interval() -> None:
    plain = drawn(1)
    biased = [*plain, *drawn(2, ["far"], mean=1.0, between=0), *drawn(3, ["further"], mean=-1.5, between=0)]
    assert width(fit(biased)) > 1.5 * width(fit(plain))
    covered = coverage(biased).set_index("source")
    assert covered.loc["far", "within"] == 0


def test_sources_count_nearly_alike_whatever_number_of_rows_they_have() -> None:
    few = drawn(1, rows=40)
    many = few + 50 * [o for o in few if o.source == "s0"]
    assert width(fit(many)) == pytest.approx(width(fit(few)), rel=0.03)


def test_a_source_of_one_row_weighs_half() -> None:
    """Beside three sources that err little, one row that errs far is left out; many rows are not."""
    near = drawn(1, ["a", "b", "c"], within=0.001, between=0.001)
    far = drawn(2, ["far"], mean=1.0, within=0.001, between=0.001)
    one, all_rows = fit([*near, far[0]]), fit([*near, *far])
    assert width(one) < 0.1
    assert width(all_rows) > 1.0


def test_steps_of_a_stand_in_have_an_interval_of_their_own_side_and_move_no_other() -> None:
    def stood_in(**errors: list[float]) -> ErrorModel:
        some = [StepObservation(s, DEEPSPEED_AS_FSDP, "host", "a", e) for s, of in errors.items() for e in of]
        return fit([*drawn(1), *some])

    plain = fit(drawn(1))
    few, many = stood_in(a=[-0.2, -0.9]), stood_in(a=[-0.9], b=[-0.1, 0.5], c=[-0.3], d=[-0.2], e=[-0.4])
    assert replace(few, of_stand_ins={}) == plain
    low, high, words = few.band(DEEPSPEED_AS_FSDP, "matmul", "a")
    assert (low, high) == (plain.band("sourced", "matmul", "a")[0], pytest.approx(math.exp(0.9)))
    assert words.startswith("DeepSpeed priced as fully_shard: 1 source, 2 rows; sourced rates, matmul")
    assert many.band(DEEPSPEED_AS_FSDP, "matmul", "a")[1] == pytest.approx(math.exp(0.4))


def test_a_bound_with_few_sources_is_drawn_to_its_class() -> None:
    exact = drawn(2, ["only"], bound="bubble", between=0, within=1e-6)
    alone = fit(exact)
    assert width(alone, bound="bubble") < 1e-4
    among = fit([*drawn(1), *exact])
    assert width(among, bound="bubble") == width(among, bound=ANY)  # not narrower for one source that fits
    several = [o for name in ("a", "b", "c") for o in drawn(2, [name], bound="host", between=0, within=1e-6)]
    assert 1e-4 < width(fit([*drawn(1), *several]), bound="host") < width(among, bound=ANY)


def test_a_bias_that_is_plain_makes_the_interval_uneven_and_keeps_the_time_within() -> None:
    low, high, _ = fit(drawn(1, mean=0.5)).band("sourced", "matmul", "a")
    assert low < math.exp(-0.5) < high == 1.0  # simulated times are too long
    low, high, _ = fit(drawn(1, mean=-0.15)).band("sourced", "matmul", "a")
    assert 1 / low < high
    low, high, _ = fit(drawn(1)).band("sourced", "matmul", "a")
    assert low * high == pytest.approx(1)


def test_a_bound_of_one_source_holds_what_that_source_erred_by() -> None:
    """The class's other rows, which weigh as two sources, do not hide it."""
    far = drawn(2, ["only"], bound="links", mean=1.0, between=0, within=0.01)
    assert width(fit([*drawn(1), *far]), bound="links") > 2 * 0.99
    several = [o for name in "abc" for o in drawn(3, [name], bound="links", between=0.1)]
    assert width(fit([*drawn(1), *far, *several]), bound="links") < 2 * 0.99


def test_what_was_never_measured_has_a_wider_interval_and_says_so() -> None:
    links = drawn(3, bound="links", between=0.3)
    model = fit([*drawn(1), *links, *drawn(2, rates="fitted", mean=-0.5)])
    assert model.interval("sourced", "matmul")[1] == "sourced rates, matmul: 8 sources, 160 rows"
    widest = max(abs(i.centre) + i.half_width for of in model.intervals.values() for i in of.values())
    interval, words = model.interval("sourced", "host")
    assert (interval.centre, interval.half_width) == (0.0, widest)  # there is no worse class that has it
    assert words.startswith("sourced rates, no measured step bound by host, so a wider one: 8 sources, ")
    interval, words = model.interval("datasheet", "matmul")
    assert (interval.centre, interval.half_width) == (0.0, widest)
    assert words.startswith("no measured step on datasheet rates, so the widest of all: 8 sources, ")
    one = fit(drawn(1, ["only"], rows=1))
    assert one.interval("sourced", "matmul")[1].endswith(": 1 source, 1 row")


def test_a_bound_without_a_step_has_that_of_the_next_worse_class() -> None:
    host = drawn(2, rates="extrapolated", bound="host", between=0.4)
    far = drawn(3, rates="datasheet", between=2.0)
    model = fit([*drawn(1), *drawn(4, rates="extrapolated"), *host, *far])
    assert model.interval("sourced", "host")[0] == model.intervals["extrapolated"]["host"]
    # no narrower than any of its own class
    near = drawn(2, rates="extrapolated", bound="bubble", between=0.0, within=1e-3)
    wide = fit([*drawn(1, between=0.5), *near])
    assert wide.interval("sourced", "bubble")[0].half_width >= wide.intervals["sourced"]["matmul"].half_width


def test_a_class_of_few_sources_is_no_narrower_than_the_next_worse() -> None:
    """One or two sources do not say how sources differ."""
    worse = drawn(2, between=0.5, rates="extrapolated")
    few, three = (drawn(1, ["a", "b", "c"][:n], between=0.01) for n in (2, 3))
    model = fit([*few, *worse])
    assert width(model) == width(model, "extrapolated")
    assert width(fit([*three, *worse])) < width(model)


def test_machines_and_kernels_are_left_out_as_sources_are() -> None:
    """One machine's times are too long, the other's too short: neither's intervals hold the other's."""
    plain = [o._replace(kernel="k") for o in drawn(1, within=0.01, between=0.01)]
    rows = [
        o._replace(machine=machine, log_error=o.log_error + error)
        for machine, error in (("a", -0.7), ("b", 0.7))
        for o in plain
    ]
    by_machine = coverage(rows, "machine")
    assert {*by_machine["left_out"]} == {"a", "b"}
    assert by_machine["within"].sum() == 0
    assert coverage(rows)["within"].sum() > 0.75 * len(rows)
    assert coverage(rows, "kernel").empty  # there is no other


def test_without_a_measured_step_there_is_no_model() -> None:
    with pytest.raises(ValueError, match="no measured step"):
        fit([])
    assert coverage(drawn(1, ["only"])).empty


def test_a_strategy_that_was_never_measured_has_a_wider_interval() -> None:
    """One of two strategies of each source errs 20% more than the other."""
    errors = drawn(1, within=0.01)
    errors += [StepObservation(o.source, o.rates, o.bound, "b", o.log_error + 0.2) for o in errors]
    model = fit(errors)
    known, other = model.band("sourced", "matmul", "b"), model.band("sourced", "matmul", "c")
    assert other[0] < known[0]
    assert other[1] > known[1]
    assert other[2] == f"{known[2]}; none of this strategy"
    assert model.band("sourced", "matmul", "a+b") == known  # both were measured
    assert model.of_strategies == pytest.approx(0.1, rel=0.2)


def test_a_bound_that_only_better_rates_have_is_as_wide_as_the_class() -> None:
    of_bubbles = drawn(3, ["p", "q", "r"], between=0.02, bound="bubble")
    wide = drawn(2, between=0.4, within=0.05, rates="extrapolated")
    model = fit([*drawn(1), *of_bubbles, *wide])
    widths = [width(model, rates, "bubble") for rates in ("sourced", "extrapolated", "datasheet")]
    assert widths[0] < widths[1] == pytest.approx(width(model, "extrapolated"))
    unseen = fit([*drawn(1), *wide, *drawn(4, mean=2.0, between=0.5, rates="transferred")])
    assert width(unseen, "extrapolated", "bubble") > 2 * widths[1]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_the_price_of_a_part_is_found_from_the_errors_of_steps(share: float) -> None:
    """What has no rate takes 6 times as long as simulated, or a sixth; the rest is right."""
    rows = [
        StepObservation(source, "transferred", "host", "a", -math.log(1 - share + share * six), unknown=share)
        for source in SOURCES
        for six in (6.0, 6.0, 1 / 6)
    ]
    model = fit([*drawn(1, rates="extrapolated", within=0.01, between=0.01), *rows])
    assert model.of_unknown["transferred"] == pytest.approx(math.log(6), rel=1e-6)
    ends = [model.band("transferred", "host", "a", part)[:2] for part in (0.02, 0.05, share)]
    assert all(
        low <= 1 - part * 5 / 6 and 1 + 5 * part <= high
        for part, (low, high) in zip((0.02, 0.05), ends[:2], strict=True)
    )
    assert ends[0][1] < 1.15 < ends[1][1] < 1.35
    assert all(o.log_error == 0 or _holds(model, o) for o in rows)
    assert (
        "2% of the step on transferred rates, the rest as on extrapolated ones"
        in model.band("transferred", "host", "a", 0.02)[2]
    )
    # a share of all, and one that nobody told, have the interval of the class
    assert model.band("transferred", "host", "a", 1.0)[1] == model.band("transferred", "host", "a")[1]
    assert ErrorModel.from_dict(model.as_dict()).band("transferred", "host", "a", 0.05)[0] == pytest.approx(
        ends[1][0], rel=1e-5
    )


def _holds(model: ErrorModel, o: StepObservation) -> bool:
    low, high, _ = model.band(o.rates, o.bound, o.strategy, o.unknown)
    return low <= math.exp(-o.log_error) <= high


def test_ties_are_of_differences_within_a_source() -> None:
    """Sources err by a factor of 1.5, and splits of a run by 2%."""
    random = Random(1)
    errors = [
        StepObservation(source, "sourced", "matmul", "a", effect + random.gauss(0, 0.02), f"{source} {run}")
        for source in SOURCES
        for effect in [random.gauss(0, 0.4)]
        for run in range(5)
        for _ in range(4)
    ]
    model = fit(errors)
    assert width(model) > 0.5
    assert math.log(model.tie("sourced")) == pytest.approx(1.28 * 0.02 * math.sqrt(2), rel=0.3)
    assert model.tie("datasheet") == model.tie("sourced")  # of all
    assert fit(drawn(1)).tie("sourced") == 1.0


def test_orders_are_counted_by_how_far_simulated_times_are_apart() -> None:
    """A run of two splits of each of eight sources, 8% apart as simulated; measured, half of them are the
    other way round. A row of another run is compared with none."""
    rows = []
    for number, source in enumerate(SOURCES):
        first = StepObservation(source, "sourced", "matmul", "a", 0.0, "run", 0.0)
        error = 0.1 if number % 2 else 0.0
        second = StepObservation(source, "sourced", "matmul", "b", error, "run", math.log(1.08))
        rows += [first, second, StepObservation(source, "sourced", "matmul", "b", 0.0, "other run", 5.0)]
    model = fit(rows)
    said = "of 8 measured pairs 5 to 10% apart, 50% were in the simulated order"
    assert model.order("sourced", 1.08) == model.order("sourced", 1 / 1.08) == said
    assert model.order("datasheet", 1.08) == said  # of all
    assert model.order("sourced", 1.12) == ""
    assert ErrorModel.from_dict(model.as_dict()).order("sourced", 1.08) == said


def test_the_file_holds_the_model_to_six_digits() -> None:
    model = fit([*drawn(1), *drawn(2, rates="fitted")])
    again = ErrorModel.from_dict(model.as_dict())
    assert again.as_dict() == model.as_dict()
    assert again.band("sourced", "matmul", "a")[:2] == pytest.approx(
        model.band("sourced", "matmul", "a")[:2], rel=1e-5
    )


def test_a_time_that_lacks_a_rate_is_not_the_surer_for_it() -> None:
    lucky = drawn(2, ["other"], between=0.0, within=0.001, rates="substituted")
    model = fit([*drawn(1), *lucky])
    assert width(model, "substituted") >= width(model)
    # nor narrower than what such times were off by
    off = drawn(2, ["other"], between=0.0, within=0.001, mean=-1.4, rates="substituted")
    assert fit([*drawn(1), *off]).band("substituted", "matmul", "a")[1] > math.exp(1.39)
    # whichever part of the step seems to bound it, by prices of which one is missing
    links = drawn(3, ["links"], between=0.0, within=0.001, mean=-1.4, bound="links", rates="substituted")
    both = fit([*drawn(1), *lucky, *links])
    assert width(both, "substituted") == width(both, "substituted", "links") > 2 * 1.39
    # nor where all prices are datasheets'
    bare = [o._replace(rates="datasheet") for o in (*lucky, *links)]
    assert width(fit(bare), "datasheet") == width(fit(bare), "datasheet", "links") > 1.0


def test_an_error_at_the_end_of_an_interval_lies_within() -> None:
    """Simulated times that are exact have an interval without width."""
    covered = coverage(drawn(1, between=0, within=0))
    assert [*covered["within"]] == [*covered["rows"]] == [20] * len(SOURCES)


CARD = 2**36


def cell(model: str = "llama3-8b", strategy: str = "ulysses", **settings: Any) -> Cell:
    sizes = {"sp": 8, **settings.pop("sizes", {})}
    training = {"backend": settings.pop("backend", "zero3")}
    return Cell(
        model=model, strategy=strategy, sizes=sizes, batch=8, seq_len=8192, training=training, **settings
    )


def measured(part: float, status: str = "ok", returned: int = 0, step: int = 2) -> dict[str, Any]:
    entry = {"step": step, "reserved_memory_bytes": int(part * CARD), "returned_bytes": returned}
    return {"status": status, "usable_memory_bytes": CARD, "by_class": [entry]}


@tabled(__file__, "a_verdict_is_as_sure_as_what_was_measured")
def test_a_verdict_is_as_sure_as_what_was_measured(
    of: dict[str, Any], measures: dict[str, Any], word: str, reason: str
) -> None:
    verdict = certainty(cell(**of), measured(**measures))
    assert verdict.word == word
    assert reason in verdict.reason
    assert bool(verdict.reason) is (word == "tight")


def test_without_a_limit_or_on_real_ranks_there_is_no_verdict() -> None:
    assert certainty(cell(), measured(0.5) | {"usable_memory_bytes": None}) is None
    assert certainty(cell(engine="distributed"), measured(0.5)) is None
    assert filled(measured(0.5, returned=1)) == 1.0


def test_the_border_is_that_of_measured_kinds() -> None:
    runs = [
        Filled(part, kinds, "zero3", "me", published_oom=oom, oom=False)
        for part, kinds, oom in [(0.93, {"a"}, True), (0.2, {"b"}, True), (0.8, {"a"}, False)]
    ]
    evidence = Evidence.of(runs, {"a"})
    assert evidence == Evidence(0.93, ["a"])
    assert [evidence.judged(run).word for run in runs] == ["tight", "tight", "fits"]
    assert Evidence.of([], {"a"}).border == 1.0
    assert 0.85 < packaged_evidence().border < 1


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
    measured = bands.with_band(row(), MODEL)["measurement"]
    assert measured["step_time_low_s"] == pytest.approx(2 * 0.905, rel=1e-3)
    assert measured["step_time_high_s"] == pytest.approx(2 * 1.105, rel=1e-3)
    assert measured["band"] == "sourced rates, matmul: 1 source, 1 row"
    assert measured["step_time_s"] == 2.0


@pytest.mark.parametrize("without", [{"step_time_s": None}, {"bound": ""}, {"rates": ""}])
def test_other_rows_stay_as_they_are(without: dict[str, Any]) -> None:
    plain = row(**without)
    assert bands.with_band(plain, MODEL) == plain


def test_rows_are_read_with_the_intervals_of_the_package() -> None:
    entry = flat(row())
    low, high, words = bands.packaged_model().band("sourced", "matmul", "ulysses")
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
    words = bands.with_band(lacking, MODEL)["measurement"]["band"]
    cluster = lacking["cell"].get("cluster") or "this cluster"
    assert words.startswith(
        f"no rate of forward attention by triton on {cluster}, priced by matmuls; no measured"
    )
    # the table of `spbench run` and files have rows on one level
    assert shown_band(flat(lacking)).endswith(", no rate of forward attention by triton")
    assert (
        "triton" not in bands.with_band(row(**LACKING), MODEL)["measurement"]["band"]
    )  # which has all that counts


def stood_in(*some: StandIn) -> dict[str, Any]:
    return {"rates": str(some[0]), "priced_by": [each.price for each in some]}


BY_WORK = {each.work: each for each in STAND_INS}
DEEPSPEED = stood_in(BY_WORK["DeepSpeed"])


def test_a_row_names_the_program_that_another_stands_in_for() -> None:
    measured = bands.with_band(row(**DEEPSPEED), MODEL)["measurement"]
    assert measured["lacks"] == "DeepSpeed"
    said = "DeepSpeed priced as fully_shard: 1 source, 4 rows; sourced rates, matmul: 1 source, 1 row"
    assert measured["band"] == said
    both = {**DEEPSPEED, "priced_by": [*DEEPSPEED["priced_by"], *LACKING["priced_by"]]}
    lacking = bands.with_band(row(**both), MODEL)["measurement"]
    assert lacking["lacks"] == "DeepSpeed, forward attention by triton"


@pytest.mark.parametrize("missing", ["step_time_low_s", "step_time_high_s"])
def test_a_time_with_one_end_of_its_interval_stands_alone(missing: str) -> None:
    """As of a damaged row."""
    assert shown_band({**bands.with_band(row(), MODEL)["measurement"], missing: None}) == "2.00 s"


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
        (stood_in(BY_WORK["expert parallelism"]), "2.00 s -50% +101%, expert parallelism, measured slower"),
        (
            stood_in(BY_WORK["DeepSpeed"], BY_WORK["expert parallelism"]) | {"rates": "datasheet"},
            "2.00 s -50% +101%, uncalibrated",
        ),
        ({"step_time_s": None}, ""),
    ],
)
def test_a_time_is_shown_with_its_interval(measured: dict[str, Any], text: str) -> None:
    assert shown_band(bands.with_band(row(**measured), MODEL)["measurement"]) == text


def test_times_that_differ_less_than_errors_do_are_ties() -> None:
    other = {"sizes": {"sp": 2, "dp": 2}, "batch": 2}
    rows = [row(2.0), row(2.09), row(2.2), row(4.1, other), row(1.0, {"seq_len": 32}), row(None)]
    assert bands.tied(rows, MODEL) == [True, True, False, True, None, None]


def test_without_a_tie_the_fastest_is_alone() -> None:
    assert bands.tied([row(2.0), row(3.0)], MODEL) == [False, False]


def test_recomputation_and_splits_are_of_one_run_and_other_models_are_not() -> None:
    plain, again = row(2.0), row(2.01, {"model_options": {"recompute": "full"}})
    deeper = row(2.01, {"model_options": {"layers": 8}})
    assert bands.tied([plain, again, deeper], MODEL) == [True, True, None]


ERRORS = {"ddp": {bands.PEAK: [-0.02, 0.0, 0.001, -0.00005]}, "zero3": {bands.PEAK: [0.1]}}


def test_errors_of_a_backend() -> None:
    found = bands.past_errors("ddp", bands.PEAK, ERRORS)
    assert (found.rows, found.under, found.furthest_under, found.worst) == (4, 1, 0.02, 0.02)
    assert found.median == pytest.approx(0.000525)
    assert str(found) == (
        "peak of 4 measured numbers of the backend ddp: median error 0.05%, worst 2.0%, 1 too low by more "
        "than 0.01%, at most by 2.00%"
    )


def test_what_was_not_measured_has_the_errors_of_all() -> None:
    found = bands.past_errors("zero1", bands.PEAK, ERRORS)
    assert (found.rows, found.of) == (5, "all backends (none of zero1)")
    assert bands.past_errors("zero1", bands.RESERVED, ERRORS) is None


def test_the_package_has_errors() -> None:
    assert len(bands.packaged_errors()["megatron"][bands.PEAK]) > 100
