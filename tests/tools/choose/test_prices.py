"""What settings of a layout cost: what `spbench run` has of it and of it with that one changed; which memory
switches are taken away, on made-up times; and floors of steps, by the places of a group's ranks."""

import math
import re
from typing import Any

import pytest

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.tools.choose import asking as module
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.advise_report import report
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking, Task
from spbench.bench.tools.choose.layout_search import answered
from spbench.bench.tools.choose.look import look
from spbench.bench.tools.choose.question import question
from spbench.bench.tools.choose.ranking import SearchResult, Seen, links_floor_s, ranked
from spbench.bench.tools.choose.suggestions import dotted
from spbench.bench.tools.choose.whole_looks import LookedAt, other_kernels, other_settings, without_switches
from tests.bench.hosts import CrewHere
from tests.grid import data, tabled
from tests.slow import mostly_slow, slow
from tests.terminal import screen_of
from tests.tools.choose.questions import Answers, asked, measured

GIB = 2**30
MADE_UP = data(__file__)["MADE_UP"]


def made_up(cell: Cell) -> dict[str, Any]:
    """Cards have 80 GiB, of which 76 must be taken at the most."""
    on = [MADE_UP[n] for n in (*cell.model_options, *cell.training.backend_options) if n in MADE_UP]
    gib = 97 - sum(gib for _, gib in on)
    return measured(math.prod(factor for factor, _ in on), gib * GIB, 80 * GIB)


def layout(options: dict[str, Any], **training: Any) -> Cell:
    cell = asked(8).cell
    backend = TrainingOptions.model_validate({"backend": "zero3", **training})
    return cell.model_copy(update={"model_options": {**cell.model_options, **options}, "training": backend})


@tabled(__file__, "each_switch_is_taken_away_alone")
def test_each_switch_is_taken_away_alone(options: Any, training: Any, fixed: Any, taken: list[str]) -> None:
    cell = layout(options, **training)
    cells = without_switches(asked(8, fixed=[(*pair,) for pair in fixed]), cell)
    assert [*cells] == taken
    for settings, other in cells.items():
        own = {**cell.model_options, **cell.training.backend_options}
        left = {**other.model_options, **other.training.backend_options}
        assert len(own) - len(left) == settings.count("=")
        assert left.items() <= own.items()


@pytest.mark.parametrize("options", [{}, {"placement": "contiguous"}])
def test_each_other_setting_has_words(options: dict[str, Any]) -> None:
    about, ring = asked(8), {"strategy": "ring_attention", "sizes": {"sp": 8}}
    cell = changed(about.cell, {**ring, "strategy_options": options})
    words = [*other_settings(about, cell)]
    assert "placement=striped" in words
    assert "" not in words


def lightened(cell: Cell) -> Cell:
    """What is named in place of a layout, the only one that was looked at."""
    answers: Any = Answers(made_up)
    so_far = LookedAt(asked(8), answers)
    ((_, outcome),) = answers([Task(cell, look)])
    so_far.seen[cell.key] = Seen(cell, outcome.measurement, depth="few_layers")
    so_far.look_whole()
    return ranked(so_far.best_layouts())[0].cell


@tabled(__file__, "what_spare_memory_makes_needless_is_left_out")
def test_what_spare_memory_makes_needless_is_left_out(options: list[str], left: list[str]) -> None:
    values = {"recompute": "full", "checkpoints": "host", "mlp_tile": 64, "cross_entropy": "in_place"}
    plain = asked(8).cell.model_options
    cell = lightened(layout({name: values[name] for name in options}))
    assert sorted({*cell.model_options} - {*plain}) == sorted(left)


def by_run(cell: Cell) -> tuple[str, float, int]:
    """What `spbench run` finds, timed even where it does not fit."""
    found, _ = virtual.measured(cell, also_too_large=True)
    assert found.step_time_s is not None
    assert found.peak_memory_bytes is not None
    return found.status, found.step_time_s, found.peak_memory_bytes


def check(answer: Advice) -> int:
    """Every price that is printed is what a run of both layouts shows; returns how many there are."""
    winner = answer.winner
    assert winner is not None
    _, own_s, own_bytes = by_run(winner.cell)
    texts = []
    for price in answer.prices:
        status, step_s, nbytes = by_run(price.changed.cell)
        assert price.changed.measurement["status"] == status
        sign, ratio, more = 1 if price.used else -1, step_s / own_s, nbytes - own_bytes
        assert price.ratio == pytest.approx(ratio**-sign, rel=1e-6)
        assert price.saved_bytes == pytest.approx(sign * more, abs=1e-4 * own_bytes)
        if price.used:
            fits = "" if status == "ok" else ", and does not fit"
            texts.append(f"without {price.settings} it takes {ratio - 1:+.0%}, {more / GIB:+.3g} GiB{fits}")
    screen = " ".join(screen_of(report([answer]), 120).split())
    said = re.findall(r"without [\w.]+=\S+ it takes [^;]*?GiB(?:, and does not fit)?", screen)
    assert said == texts[: len(said)]
    for seen in answer.ranked:
        assert seen.exact
        assert by_run(seen.cell)[1] == pytest.approx(seen.step_s, rel=1e-6)
    return len(answer.prices)


#: as a search may name them: strategy, ranks along axes, options of the model, settings of training
LAYOUTS = data(__file__)["LAYOUTS"]


@pytest.mark.parametrize("case", mostly_slow(LAYOUTS, "placements"))
def test_prices_are_what_runs_show(case: str, monkeypatch: pytest.MonkeyPatch, kept_traces: None) -> None:
    monkeypatch.setattr(module, "Crew", CrewHere)
    strategy, sizes, options, training = LAYOUTS[case]
    of_model = {"model": "moe-tiny"} if "ep" in LAYOUTS[case][1] else {}
    about = asked(4, seq_len=128, batch=8, settings={**of_model, "model_options.layers": 4})
    settings = {"strategy": strategy, **{f"sizes.{axis}": n for axis, n in sizes.items()}}
    settings |= dotted("model_options", options) | dotted("training", training)
    cell = changed(about.cell, settings)
    with Asking() as here:
        so_far = LookedAt(about, here)
        (layout,) = so_far.looked_at([cell], "all_layers")
        prices = so_far.prices(layout)
    assert check(Advice(about, SearchResult(best=[layout], of_strategies=[layout]), prices=prices)) > 0


K = 2**10
RECOMPUTED = {"batch": 1, "model_options.recompute": "full"}
#: model, cluster, GPUs, length, settings, strategies and backends, ranks that are given
REAL: list[tuple[str, str, int, int, dict[str, Any], list[str], list[tuple[str, str]]]] = [
    ("qwen3-30b-a3b", "dgx-h100", 64, 32 * K, {}, ["single", "ulysses", "zero3"], [("pp", "1")]),
    ("llama3-8b", "dgx-h100", 8, 128 * K, {"batch": 8}, ["ulysses", "zero2"], [("pp", "1")]),
    ("llama3-8b", "dgx-h100", 64, 128 * K, {}, ["ulysses", "zero2", "zero3"], [("pp", "1")]),
    ("llama3-70b", "dgx-h100", 64, 128 * K, RECOMPUTED, ["megatron_sp+ulysses", "zero3"], [("dp", "1")]),
]


@pytest.mark.parametrize("at", [slow(at) for at in range(len(REAL))])
def test_prices_of_an_answer_are_what_runs_show(at: int) -> None:
    model, cluster, gpus, length, settings, only, fixed = REAL[at]
    asks = Asked(cluster, gpus, None, {"seq_len": length, **settings})
    (answer,) = answered([question((model,), asks, only=only, fixed=fixed)])
    assert check(answer) > 0
    if at == 0:  # data parallelism with what its memory asks for, and not all that there is
        assert answer.winner is not None
        assert not {"checkpoints", "mlp_tile"} & {*answer.winner.cell.model_options}


def test_other_kernels_are_those_that_the_card_has_rates_of() -> None:
    kernels = other_kernels(layout({"attention": "flash_attention_2"}))
    assert len(kernels) > 1
    assert "flash_attention_2" in kernels


H100 = load_cluster("dgx-h100")  # eight cards and eight network cards a node
assert H100.node_link is not None
NODE = H100.node_link.bandwidth_bytes_per_s.value or 0.0
CARD = H100.network.bandwidth_bytes_per_s.value or 0.0
SENT = 2**30


def cell(**sizes: int) -> Cell:
    made = asked(8, cluster="dgx-h100").cell
    return Cell.model_validate({**made.model_dump(exclude_defaults=True), "sizes": sizes})


def floor(made: Cell, axis: str, collective: str) -> float | None:
    row = {"axis": axis, "collective": collective, "sent_bytes": SENT}
    return links_floor_s(made, {"formula": [row]})


@pytest.mark.parametrize(
    ("sizes", "axis", "collective", "seconds"),
    [
        ({"tp": 8}, "tp", "all_reduce", SENT / NODE),
        ({"dp": 16}, "dp", "all_reduce", SENT / min(NODE, 8 * CARD)),  # a ring leaves a node by all cards
        ({"dp": 2, "tp": 8}, "dp", "all_reduce", SENT / CARD),  # one rank of the group in each node
        ({"sp": 16}, "sp", "all_to_all", SENT * 8 / 15 / CARD),  # to 8 of 15 others across nodes
        ({"sp": 16}, "sp", "send", SENT / CARD),  # one message, one card
        ({"dp": 2, "sp": 8}, "dp_sp", "all_gather", SENT / min(NODE, 8 * CARD)),
    ],
)
def test_bytes_at_the_links(sizes: dict[str, int], axis: str, collective: str, seconds: float) -> None:
    assert floor(cell(**sizes), axis, collective) == pytest.approx(seconds)


def test_links_work_at_the_same_time() -> None:
    rows = [{"axis": axis, "collective": "all_reduce", "sent_bytes": SENT} for axis in ("dp", "tp")]
    assert links_floor_s(cell(dp=2, tp=8), {"formula": rows}) == pytest.approx(SENT / CARD)


def test_a_card_without_links_has_no_floor_of_them() -> None:
    made: dict[str, Any] = asked(8).cell.model_dump(exclude_defaults=True)
    local = Cell.model_validate({**made, "cluster": "local", "sizes": {"dp": 2}})
    assert floor(local, "dp", "all_reduce") is None
    assert links_floor_s(local, {"formula": []}) == 0.0


def test_the_floor_of_computing_is_that_of_the_datasheet() -> None:
    for mfu, floor_s in ((0.4, 0.8), (None, None)):
        best = [Seen(asked(8).cell, measured(2.0, mfu=mfu))]
        (record,) = Advice(asked(8), SearchResult(best=best)).records()
        assert record["compute_floor_s"] == floor_s
