"""What steps on a real device say beside their times."""

from spbench.bench.cell import Timing
from spbench.bench.measure.engines.timed_steps import add_timed_steps, remark
from spbench.bench.measurement import Measurement


def test_steps_on_a_cpu() -> None:
    calls: list[None] = []
    metered, timing = Measurement(peak_memory_bytes=7), Timing(warmup=2, samples=3)
    timed = add_timed_steps(metered, 1, lambda: calls.append(None), timing, "cpu")
    assert len(calls) == 5
    assert len(timed.step_time_samples_s) == 3
    assert (timed.ranks[0]["rank"], timed.ranks[0]["device"], timed.peak_memory_bytes) == (1, "cpu", 7)
    assert "telemetry" not in timed.ranks[0]


def test_a_row_says_on_which_rank_clocks_fell() -> None:
    quiet = {"rank": 0, "telemetry": {"clocks_note": None}}
    hot = {"rank": 5, "telemetry": {"clocks_note": "clocks fell to 1200 MHz (thermal)"}}
    assert remark([quiet, {"rank": 1}]) == ""
    assert remark([quiet, hot]) == "rank 5: clocks fell to 1200 MHz (thermal)"
