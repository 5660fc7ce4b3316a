"""What steps on a real device say beside their times."""

from spbench.bench.cell import Timing
from spbench.bench.engines.timed_steps import remark, timed_steps


def test_steps_on_a_cpu() -> None:
    calls: list[None] = []
    timed = timed_steps(lambda: calls.append(None), Timing(warmup=2, samples=3), "cpu")
    assert len(calls) == 5
    assert len(timed.samples_s) == 3
    assert timed.device["device"] == "cpu"
    assert "telemetry" not in timed.device


def test_a_row_says_on_which_rank_clocks_fell() -> None:
    quiet = {"rank": 0, "telemetry": {"clocks_note": None}}
    hot = {"rank": 5, "telemetry": {"clocks_note": "clocks fell to 1200 MHz (thermal)"}}
    assert remark([quiet, {"rank": 1}]) == ""
    assert remark([quiet, hot]) == "rank 5: clocks fell to 1200 MHz (thermal)"
