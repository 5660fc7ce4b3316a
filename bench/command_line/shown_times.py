"""Simulated times as text, with their intervals."""

import math
from collections.abc import Mapping
from typing import Any

from spbench.bench.measure import NO_RATE
from spbench.bench.setting_values import STOOD_IN
from spbench.bench.units import shown_time

#: the mark after a time that is a tie with the fastest
TIE = "≈"
TIE_LEGEND = (
    f"{TIE}: a tie, by the time of a sample, with the fastest of the same model, length and GPUs, of any "
    "batch; they differ by less than such predictions err"
)

#: the words after a time, by the class of the rates that priced it (:attr:`Measurement.rates`)
_MARKED = {"datasheet": ", uncalibrated", "fitted elsewhere": ", fitted to others"}


def shown_band(measured: Mapping[str, Any]) -> str:
    """The step time of a row's measurement as text, with its interval if it has one: "2.31 s ±9%", "2.31 s
    -12% +40%, uncalibrated", "2.31 s ±60%, no rate of forward attention by triton" or "2.31 s -15% +110%,
    DeepSpeed priced as fully_shard"; "" if there is no time."""
    step_time_s, low, high = (measured.get(f"step_time_{name}s") for name in ("", "low_", "high_"))
    if not step_time_s:
        return ""
    if low is None or high is None:
        return shown_time(step_time_s)
    rates, lacks = measured.get("rates") or "", measured.get("lacks")
    marked = _MARKED | {name: f", {name}" for name in STOOD_IN}
    word = f", no rate of {lacks}" if lacks and rates in NO_RATE else marked.get(rates, "")
    return f"{shown_time(step_time_s)} {_spread(low / step_time_s - 1, high / step_time_s - 1)}{word}"


def _spread(low: float, high: float) -> str:
    """The ends of an interval in percent of the time: "±9%" if both are equally far, else "-12% +40%"."""
    both = math.sqrt((1 + high) / (1 + low)) - 1
    balanced = math.isclose((1 + high) * (1 + low), 1, abs_tol=0.005)
    return f"±{both:.0%}" if balanced and both < 0.5 else f"{low:+.0%} {high:+.0%}"
