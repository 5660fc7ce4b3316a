"""What a terminal shows of `spbench advise`: at most 40 lines, also where many long names tie."""

from __future__ import annotations

from dataclasses import replace

from spbench.bench.command_line.output import Table, View
from spbench.bench.tools.advise.advise_report import report
from spbench.bench.tools.advise.possible import Absence
from spbench.bench.tools.advise.ranking import Seen
from spbench.bench.tools.advise.whole_looks import Price
from tests.terminal import faults_of, screen_of
from tests.tools.advise.test_advice import advice, seen

GIB = 2**30
MIXES = ("ulysses", "ring_attention", "megatron_sp+ulysses", "megatron_sp+ulysses+ring_attention")


def price(settings: str, layout: Seen, step_s: float, gib: float) -> Price:
    """Of a setting without which a layout takes so many seconds, and needs so much more."""
    without = seen("ulysses", {"sp": 8}, step_s)
    measured = {**without.measured, "peak_memory_bytes": layout.peak + int(gib * GIB)}
    without.outcome = replace(without.outcome, status="oom" if gib > 99 else "ok", measurement=measured)
    return Price(settings, True, layout, without)


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
    absence = Absence((), "no layout with tp2 can be: made up")
    answer = advice(*best, seen("single", {"dp": 8}, 60.0), prices=prices, absence=absence)
    answer.result.counts.update({"looked at": 523510, "cannot be": 324000, "traced with few layers": 80})
    output = report([answer], {"tp": 2})
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
