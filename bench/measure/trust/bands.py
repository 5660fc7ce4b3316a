"""The interval of each simulated step time, and which times are ties; from the errors in bands.json.

``spbench reproduce bands --write`` writes that file from the committed results of ``spbench reproduce``. Rows
on disk are without bands: these are those of this version, and are added when rows are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from spbench.bench.measure.trust.error_model import ErrorModel, grouped
from spbench.bench.units import shown_time

BANDS_FILE = "bands.json"
#: the mark of a time that is a tie with the best
TIE = "≈"
TIE_LEGEND = (
    f"{TIE}: a tie with the fastest of its model, length and GPUs: they differ by less than the errors of "
    "two splits do"
)

#: what is said of a time on such rates
_MARKED = {"datasheet": ", uncalibrated", "substituted": ", a rate is missing"}

Row = Mapping[str, Any]


@cache
def packaged_model() -> ErrorModel:
    """The errors that this version comes with."""
    return ErrorModel.from_dict(
        json.loads(files(__package__).joinpath(BANDS_FILE).read_text(encoding="utf-8"))
    )


def with_band(row: Row, model: ErrorModel | None = None) -> dict[str, Any]:
    """A row, with ``step_time_low_s``, ``step_time_high_s`` and ``band``, what these rest on in words, in its
    measurement where that has a simulated step time; measured times have none.

    Args:
        model: that of the package if left out.
    """
    measured = row["measurement"]
    step_time_s, rates, bound = (measured.get(name) for name in ("step_time_s", "rates", "bound"))
    if not (step_time_s and rates and bound):
        return dict(row)
    low, high, words = (model or packaged_model()).band(rates, bound, row["cell"].get("strategy") or "")
    ends = {"step_time_low_s": step_time_s * low, "step_time_high_s": step_time_s * high}
    return {**row, "measurement": {**measured, **ends, "band": words}}


def shown_band(measured: Mapping[str, Any]) -> str:
    """A step time with its interval, such as "2.31 s ±9%" or "2.31 s -12% +40%, uncalibrated"; "" without a
    time, and the time alone where it has no interval."""
    step_time_s, low, high = (measured.get(f"step_time_{name}s") for name in ("", "low_", "high_"))
    if not step_time_s:
        return ""
    if low is None or high is None:
        return shown_time(step_time_s)
    word = _MARKED.get(measured.get("rates") or "", "")
    return f"{shown_time(step_time_s)} {_spread(low / step_time_s - 1, high / step_time_s - 1)}{word}"


def _spread(low: float, high: float) -> str:
    """The ends of an interval as parts of the time; one number where they are the same up or down."""
    both = math.sqrt((1 + high) / (1 + low)) - 1
    balanced = math.isclose((1 + high) * (1 + low), 1, abs_tol=0.005)
    return f"±{both:.0%}" if balanced and both < 0.5 else f"{low:+.0%} {high:+.0%}"


def tied(rows: Sequence[Row], model: ErrorModel | None = None) -> list[bool | None]:
    """Of each row, whether its time of a sample is a tie with the shortest of its run (:func:`run_of`); of
    the shortest, whether another one ties with it. None for a row without a simulated time, or alone in its
    run.

    Times of one run err together, so this is judged by how far they err differently, not by their intervals.
    """
    found: list[bool | None] = [None] * len(rows)
    timed = [
        at
        for at, row in enumerate(rows)
        if row["measurement"].get("bound") and row["measurement"].get("step_time_s")
    ]
    for places in grouped(timed, lambda at: run_of(rows[at]["cell"])).values():
        if len(places) < 2:
            continue
        times = {
            at: rows[at]["measurement"]["step_time_s"] / (rows[at]["cell"].get("batch") or 1) for at in places
        }
        best = min(times, key=times.__getitem__)
        limit = (model or packaged_model()).tie(rows[best]["measurement"].get("rates") or "")
        close = [at for at in places if times[at] <= times[best] * limit]
        for at in places:
            found[at] = len(close) > 1 and at in close
    return found


def run_of(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """What cells have in common whose times are compared: all but the batch, how it is split, and what is
    computed again."""
    options = {
        k: v
        for k, v in (cell.get("model_options") or {}).items()
        if not k.startswith(("recompute", "checkpointing"))
    }
    ranks = math.prod((cell.get("sizes") or {}).values())
    kind = (cell.get("training") or {}).get("step", "training")
    names = ("model", "seq_len", "precision", "cluster", "engine")
    return (*(str(cell.get(name)) for name in names), json.dumps(options, sort_keys=True), str(ranks), kind)
