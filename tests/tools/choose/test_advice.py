"""Answers of searches: ties, the simplest first, why the winner wins, and what a terminal shows of them."""

import re
from dataclasses import replace
from typing import Any

import pytest

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.command_line.output import Table, View
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.measure.trust.bands import packaged_model
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.advise_report import report, turns, varying
from spbench.bench.tools.choose.ranking import NAMED, SearchResult, Seen, complexity, settings_beside, simpler
from spbench.bench.tools.choose.whole_looks import Price
from spbench.bench.tools.choose.whole_looks import price as price_of
from tests.grid import tabled
from tests.terminal import faults_of, screen_of
from tests.tools.choose.questions import asked, measured

TIE = packaged_model().tie("sourced")
PARTS = {"matmul_s": 0.6, "attention_s": 0.2, "memory_bound_s": 0.1, "intra_node_s": 0.05}


def seen(strategy: str, sizes: dict[str, int], step_s: float, **parts: float) -> Seen:
    cell = asked(8).cell
    cell = Cell.model_validate(
        {**cell.model_dump(exclude_defaults=True), "strategy": strategy, "sizes": sizes}
    )
    measurement = measured(
        step_s,
        formula=[{"sent_bytes": 2**20, "axis": "sp", "collective": "all_to_all"}],
        breakdown={"exposed_communication_s": 0.05, "bubble_s": 0.0, "host_s": 0.01},
        parts={**PARTS, **parts},
    )
    return Seen(cell, measurement)


def advice(*best: Seen, **more: Any) -> Advice:
    ordered = sorted(best, key=lambda each: each.step_s)
    strategies = {each.cell.strategy: each for each in reversed(ordered)}
    of_strategies = sorted(strategies.values(), key=lambda each: each.step_s)
    return Advice(asked(8), SearchResult(best=ordered, of_strategies=of_strategies), **more)


FAST = seen("ulysses+ring_attention", {"cp": 2, "sp": 4}, 1.0)
SIMPLE = seen("ulysses", {"sp": 8}, 1.0 + 0.5 * (TIE - 1), attention_s=0.3)
FAR = seen("single", {"dp": 8}, 1.1 * TIE, intra_node_s=0.4)


def test_of_ties_the_simplest_is_first() -> None:
    answer = advice(FAST, SIMPLE, FAR)
    assert answer.ranked == [SIMPLE, FAST, FAR]
    assert answer.winner is SIMPLE
    assert [record["tie"] for record in answer.records()] == [True, True, False]
    assert [record["rank"] for record in answer.records()] == [1, 2, 3]


def test_static_groups_are_compared_with_groups_by_length() -> None:
    by_length, alike = (seen("dynamic_cp", {"sp": 8}, step_s) for step_s in (1.0, 1.25))
    options = {"strategy_options": {"groups": "static", "least_ranks": 4}}
    static = replace(alike, cell=alike.cell.model_copy(update=options))
    answer = advice(by_length)
    assert answer.text("packed") == ""
    answer.result.traced = [static, by_length]
    assert "takes 20% less time than static groups of 4, dynamic_cp sp8; Megatron" in answer.text("packed")
    cell = changed(answer.question.cell, {"model_options.documents": [16]})
    assert "not searched: group_cast" in replace(answer, question=replace(asked(8), cell=cell)).text("packed")


def test_what_is_hidden_is_never_simpler_than_a_tie_that_is_shown() -> None:
    """Ten layouts of two strategies are faster than the plain one, which is named first all the same."""
    mixes = [seen("ulysses+ring_attention", {"cp": 2, "sp": 4}, 1.0 + 0.001 * at) for at in range(10)]
    answer = advice(*mixes, SIMPLE, FAR)
    assert answer.winner is SIMPLE
    assert len(answer.ranked) == NAMED
    shown = max(complexity(each.cell) for each in answer.ranked)
    assert all(complexity(each.cell) >= shown for each in answer.ties[NAMED:])
    assert len(answer.ties[NAMED:]) == len(mixes) + 1 - NAMED


def test_what_is_simpler_than_the_first_is_told_with_its_price() -> None:
    assert simpler([FAST, FAR], FAST) == [FAR]
    assert simpler([FAST, FAR], FAR) == []


def test_spare_is_of_what_the_card_must_have() -> None:
    for record in advice(FAST, SIMPLE, FAR).records():
        assert record["spare_bytes"] == record["card_bytes"] - record["total_bytes"]
        assert record["total_bytes"] >= record["peak_memory_bytes"]


def test_beyond_the_errors_the_fastest_is_first() -> None:
    answer = advice(FAST, FAR)
    assert answer.ranked == [FAST, FAR]
    assert [record["tie"] for record in answer.records()] == [False, False]


def test_a_reason_is_in_the_measurements() -> None:
    text = advice(FAST, FAR).why()
    assert text.startswith(f"the next strategy, single dp8 takes {1.1 * TIE - 1:.0%} more time; ")
    assert "exposed intra-node communication 0.4 s against 0.05" in text
    known = {f"{n:.3g}" for each in (FAST, FAR) for n in each.measurement["parts"].values()}
    assert set(re.findall(r"([\d.]+) s against", text)) | set(re.findall(r"against ([\d.]+)", text)) <= known


def test_a_tie_is_said_to_be_one() -> None:
    text = advice(FAST, SIMPLE).why()
    assert text.startswith("a tie: ulysses+ring_attention cp2xsp4 takes ")
    assert "% less time" in text
    assert "which is within the errors" in text


def test_what_a_fitted_charge_alone_tells_apart_is_a_tie() -> None:
    """The ring takes twice the time, most of the difference by the charge; another one takes it by itself."""
    charged = seen("ring_self_attention", {"sp": 8}, 2.0, matmul_s=1.6, in_blocks_s=1.0)
    slow = seen("single", {"dp": 8}, 1.9, matmul_s=1.6)
    answer = advice(FAST, slow, charged)
    assert [each.cell.strategy for each in answer.ranked] == [
        "ring_self_attention",
        "ulysses+ring_attention",
        "single",
    ]
    assert [record["tie"] for record in answer.records()] == [True, True, False]
    of_ring = answer.bars()[0]["parts"]
    assert of_ring["matmul"] == pytest.approx(0.6)
    assert of_ring["matmul in blocks, by a fitted charge"] == 1.0
    text = advice(FAST, charged).why()
    assert text.startswith("a tie: ulysses+ring_attention cp2xsp4 takes 50% less time, but +0.0% without")


def test_how_often_such_an_order_was_right_is_said() -> None:
    assert "; of " in advice(FAST, FAR).why()
    assert advice(FAST, FAR).why().endswith("were in the simulated order")


def test_a_winner_alone() -> None:
    answer = advice(FAST)
    assert answer.why() == "no other strategy fits than ulysses+ring_attention"
    alone = replace(answer.question, only=("ulysses+ring_attention", "zero3"))
    assert replace(answer, question=alone).why() == "no other strategy was asked about"
    assert advice().why() == ""
    assert report([advice()]).sections == [f"{advice().text('question')}: nothing fits"]
    assert (advice().point()["strategy"], advice().point()["tie"]) == ("", False)
    assert advice().winner is None
    assert advice().records() == []


@tabled(__file__, "what_is_simpler")
def test_what_is_simpler(simple: tuple[str, Any], other: tuple[str, Any]) -> None:
    assert complexity(seen(*simple, 1.0).cell) < complexity(seen(*other, 1.0).cell)


def test_settings_beside_the_question() -> None:
    cell = asked(8).cell
    changed = cell.model_copy(
        update={
            "model_options": {"recompute": "full"},
            "strategy_options": {"placement": "zigzag"},
            "mesh": ["pp", "dp"],
        }
    )
    assert settings_beside(cell, cell) == {}
    training = {"backend": "megatron", "schedule": "interleaved", "micro_batches": 4, "virtual_stages": 2}
    interleaved = cell.model_copy(update={"training": TrainingOptions.model_validate(training)})
    assert settings_beside(cell, interleaved) == {"training.virtual_stages": 2}
    assert settings_beside(cell, changed) == {
        "model_options.recompute": "full",
        "strategy_options.placement": "zigzag",
        "mesh": ["pp", "dp"],
    }


GIB = 2**30
MIXES = ("ulysses", "ring_attention", "megatron_sp+ulysses", "megatron_sp+ulysses+ring_attention")


def price(settings: str, layout: Seen, step_s: float, gib: float) -> Price:
    """Of a setting without which a layout takes so many seconds, and needs so much more."""
    without = seen("ulysses", {"sp": 8}, step_s)
    measured = {**without.measurement, "peak_memory_bytes": layout.peak + int(gib * GIB)}
    measured["status"] = "oom" if gib > 99 else "ok"
    return price_of(settings, True, layout, replace(without, measurement=measured))


def test_an_answer_fits_a_screen() -> None:
    sizes = {"cp": 2, "sp": 2, "tp": 2}
    best = [
        seen(strategy, {axis: sizes[axis] for axis in axes}, 30.0 + 0.01 * at)
        for at, (strategy, axes) in enumerate(
            [
                *((MIXES[3], ("cp", "sp", "tp")),) * 9,
                (MIXES[2], ("sp", "tp")),
                (MIXES[1], ("sp",)),
                *((MIXES[0], ("sp",)),) * 5,
            ]
        )
    ]
    prices = [price(f"model_options.loss_tile={2048 + n}", best[0], 20.0, 50) for n in range(6)]
    absence = ["no layout with tp2 can be: made up"]
    answer = advice(*best, seen("single", {"dp": 8}, 60.0), prices=prices, absence=absence)
    answer.result.counts.update({"looked at": 523510, "cannot be": 324000, "traced with few layers": 80})
    output = report([answer])
    assert faults_of(output, most_lines=40) == []
    assert faults_of(output, view=View(wide=True, details=True)) == []
    screen = screen_of(output, 80)
    rows = [line for line in screen.splitlines() if line.startswith("≈")]
    assert rows[0].split()[1] == "ring_attention"  # the simplest, and of these the fastest
    assert "the fastest of all megatron_sp+ulysses+ring_attention cp2xtp2xsp2" in " ".join(screen.split())
    assert "324000 cannot be" not in screen
    assert "324000 cannot be" in screen_of(output, 80, View(details=True))


def test_what_is_said_beside_the_layouts_is_of_these_layouts() -> None:
    """No mark is explained that no row has; a billion tokens by hand; what does not fit says so."""
    alone, far = seen("ulysses", {"sp": 8}, 2.0), seen("single", {"dp": 8}, 6.2)
    prices = [price("model_options.loss_tile=2048", alone, 1.6, gib) for gib in (0.5, 500)]
    screen = " ".join(screen_of(report([advice(alone, far, prices=prices)]), 120).split())
    # 1e9 / (16 samples of 256 / 2 s) / 3600 = 135.6
    assert "a billion tokens take ulysses sp8 136 h, 1090 GPU-hours" in screen
    assert "single dp8 takes 3.1 times as long" in screen
    assert "it takes -20%, +0.5 GiB; " in screen
    assert "it takes -20%, +500 GiB, and does not fit" in screen
    assert "≈" not in screen
    tie = seen("ring_attention", {"sp": 8}, 2.001)
    assert "≈: a tie with the fastest" in screen_of(report([advice(alone, tie)]), 120)


def test_several_answers_are_a_map() -> None:
    best = [seen("ulysses", {"sp": 8}, 2.0), seen("single", {"dp": 8}, 60.0)]
    fits, none = advice(*best, seconds=3.0), advice()
    none.result.impossible = "no layout of 8 GPUs is possible: made up"
    output = report([fits, none])
    assert faults_of(output) == []
    table = output.sections[0]
    assert isinstance(table, Table)
    assert table.title == "Which layout where"
    shown = [(line["length"], line["best"], line["tokens/s a GPU"], line["took"]) for line in table.lines]
    assert shown == [(256, "ulysses sp8", "256", "3 s"), (256, "no layout is possible", None, "0 s")]
    assert [record["strategy"] for record in output.records] == ["ulysses", "single"]


def point(strategy: str, **more: Any) -> dict[str, Any]:
    return {"gpus": 8, "seq_len": 8192, "figures": "", "tie": False, **more, "strategy": strategy}


def test_runs_of_one_strategy_and_ties_are_said() -> None:
    points = [
        point("single", seq_len=8192),
        point("single", seq_len=16384, tie=True),
        point("ulysses", seq_len=32768),
        point("ulysses", seq_len=65536),
        point("", seq_len=2**20),
    ]
    (line,) = turns(points)
    found, ties = line.split("; ")
    assert found == "single from 8K to 16K, ulysses from 32K to 64K, nothing fits at 1M"
    assert ties == "a tie with another strategy at 16K"


def test_a_line_for_each_value_of_what_varies_second() -> None:
    points = [
        point("single" if gpus == 8 else "lasp", seq_len=n, gpus=gpus) for n in (1, 2) for gpus in (8, 64)
    ]
    assert [*turns(points)] == ["8 GPUs: single from 1 on", "64 GPUs: lasp from 1 on"]


def test_a_figure_is_walked_along() -> None:
    name = "network.bandwidth_bytes_per_s"
    points = [point("ring_attention", figures=f"{name}=x1"), point("ulysses", figures=f"{name}=x2")]
    assert [*turns(points)] == [f"ring_attention at {name}=x1, ulysses at {name}=x2"]
    assert [*turns(points[:1])] == []


def test_three_things_at_once_have_no_map() -> None:
    points = [point("single"), point("single", gpus=16, seq_len=1, figures="x")]
    with pytest.raises(UserError, match="two of these at most"):
        varying(points)
