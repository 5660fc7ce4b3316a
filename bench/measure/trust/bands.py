"""How far to trust what was simulated: the interval (band) of a step time, which times are ties, which
substitute prices work without a rate, and how far predicted memory was from measured memory.

All rest on the errors in bands.json and memory_errors.json, which ``spbench reproduce bands --write`` writes
from the committed results of ``spbench reproduce``. Rows on disk have no bands: reading a row adds them.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from spbench.bench.cell import OWN_STEP
from spbench.bench.measure.trust.error_model import ErrorModel
from spbench.bench.setting_values import STAND_IN, StandIn
from spbench.plots.series import grouped

#: the file of errors of memory that comes with the package
MEMORY_ERRORS_FILE = "memory_errors.json"
#: grades of prices without a rate of the work (:mod:`measure.simulator.substitutes`), the worst first
GRADES = {
    STAND_IN: "Another program",
    "substituted": "No rate of its own",
    "transferred": "The rate of another",
    "extrapolated": "Extrapolated",
}
#: how many prices of a grade are named, those with the largest shares
MOST = 3

#: the quantities of memory whose errors are kept
PEAK, RESERVED = "peak", "reserved"

Row = Mapping[str, Any]
#: relative errors of memory, ours / measured - 1, by data-parallel backend and quantity
Errors = Mapping[str, Mapping[str, Sequence[float]]]


def packaged(file: str) -> Any:
    """The content of a JSON file in the folder of this module."""
    return json.loads(files(__package__).joinpath(file).read_text(encoding="utf-8"))


@cache
def packaged_model() -> ErrorModel:
    """The error model of step times that this version comes with."""
    return ErrorModel.from_dict(packaged(ErrorModel.FILE))


def with_band(row: Row, model: ErrorModel | None = None) -> dict[str, Any]:
    """A row; if its step time is simulated, its measurement also has ``step_time_low_s``,
    ``step_time_high_s``, ``band`` (what the interval rests on, in words) and ``lacks`` (the work without a
    rate that decides the class of the time).

    Args:
        model: the error model; None: the package's.
    """
    measured = row["measurement"]
    step_time_s, rates, bound = (measured.get(name) for name in ("step_time_s", "rates", "bound"))
    if not (step_time_s and rates and bound):
        return dict(row)
    strategy = row["cell"].get("strategy") or ""
    priced_by = measured.get("priced_by") or ()
    stood_in = [str(StandIn(each["work"], each["by"])) for each in priced_by if each["grade"] == STAND_IN]
    if rates in stood_in:  # then the rates count as the worst grade, whatever the share of its work
        grades = {each["grade"] for each in priced_by}
        rates = next(
            (grade for grade in ErrorModel.EVER_WORSE[:0:-1] if grade in grades), ErrorModel.EVER_WORSE[0]
        )
    unknown = unknown_share(measured)
    low, high, words = (model or packaged_model()).band(rates, bound, strategy, unknown, stood_in)
    ends: dict[str, Any] = {"step_time_low_s": step_time_s * low, "step_time_high_s": step_time_s * high}
    lacks = [each["work"] for each in priced_by if each["grade"] == STAND_IN]
    lacks += ["a measured step of the user's own program"] * (strategy == OWN_STEP)
    # of the prices with the grade that decides the class, the one with the largest share of the step
    lacking = next((each for each in priced_by if each["grade"] == rates), None)
    if lacking and rates in ErrorModel.NO_RATE:
        lacks.append(lacking["work"])
        cluster = row["cell"].get("cluster") or "this cluster"
        words = f"no rate of {lacking['work']} on {cluster}, priced by {lacking['by']}; {words}"
    ends |= {"lacks": ", ".join(lacks) or None, "band": words}
    return {**row, "measurement": {**measured, **ends}}


def unknown_share(measured: Mapping[str, Any]) -> float:
    """The share (0 to 1) of a simulated step's time in work that has no rate of its own."""
    priced_by = measured.get("priced_by") or ()
    return min(1.0, sum(each["share"] for each in priced_by if each["grade"] in ErrorModel.NO_RATE))


def tied(rows: Sequence[Row], model: ErrorModel | None = None) -> list[bool | None]:
    """Whether each row's time of a sample ties with the shortest time of the row's run (:func:`run_of`), and
    whether another time ties with the shortest. None for a row without a simulated time, or alone in its run.

    Times of one run err together, so ties are judged by differences of errors, not by intervals.
    """
    ties: list[bool | None] = [None] * len(rows)
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
            ties[at] = len(close) > 1 and at in close
    return ties


def run_of(cell: Mapping[str, Any]) -> tuple[str, ...]:
    """A key of the cells whose times are compared: all settings but batch, layout and recomputation."""
    options = {
        k: v
        for k, v in (cell.get("model_options") or {}).items()
        if not k.startswith(("recompute", "checkpointing"))
    }
    ranks = math.prod((cell.get("sizes") or {}).values())
    kind = (cell.get("training") or {}).get("step", "training")
    names = ("model", "seq_len", "precision", "cluster", "engine")
    return (*(str(cell.get(name)) for name in names), json.dumps(options, sort_keys=True), str(ranks), kind)


# -- what prices a time --------------------------------------------------------------------------------------


def priced_by_in_words(measurements: Iterable[Mapping[str, Any]]) -> str:
    """The prices that replace missing rates in some measurements, by grade, each with its share of a step:
    "no rate of its own: attention by triton (68%): matmuls". It says "up to 68%" where steps have different
    shares; "" where no rate is missing."""
    steps = [priced for measured in measurements if (priced := measured.get("priced_by"))]
    shares: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    prices: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for number, each in ((number, each) for number, step in enumerate(steps) for each in step):
        shares[each["grade"], each["work"]][number] += each["share"]
        prices[each["grade"], each["work"]][each["by"]] = None
    parts: list[str] = []
    for grade, words in GRADES.items():
        of_grade = sorted((-max(some.values()), key) for key, some in shares.items() if key[0] == grade)
        named = []
        for share, key in of_grade[:MOST]:
            differ = len({f"{shares[key][number]:.0%}" for number in range(len(steps))}) > 1
            by = " and ".join(prices[key])
            priced = f"{key[1]} ({'up to ' if differ else ''}{min(1.0, -share):.0%}): {by}"
            named.append(str(StandIn(key[1], by)) if grade == STAND_IN else priced)
        if len(of_grade) > MOST:
            named.append(f"{len(of_grade) - MOST} more")
        if named:
            parts.append(f"{words if parts else words[0].lower() + words[1:]}: {'; '.join(named)}")
    return ". ".join(parts)


# -- errors of memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PastErrors:
    """The relative errors of predictions of one quantity of memory.

    Attributes:
        of: whose predictions they are: those of a backend, or of "all backends".
        rows: how many measured numbers there are; the numbers of one run's ranks count once.
        median, worst: the median and the largest of the errors' absolute values.
        under: how many predictions were more than 0.01% below the measured number.
        furthest_under: by which part of the measured number a prediction was below it at the most.
    """

    of: str
    quantity: str
    rows: int
    median: float
    worst: float
    under: int
    furthest_under: float

    def __str__(self) -> str:
        low = f", {self.under} too low by more than 0.01%, at most by {self.furthest_under:.2%}"
        return (
            f"{self.quantity} of {self.rows} measured numbers of {self.of}: median error {self.median:.2%}, "
            f"worst {self.worst:.1%}{low if self.under else ', none too low'}"
        )


@cache
def packaged_errors() -> Errors:
    """The errors of predicted memory that this version comes with, by backend and quantity."""
    content: Errors = packaged(MEMORY_ERRORS_FILE)
    return content


def past_errors(backend: str, quantity: str, errors: Errors | None = None) -> PastErrors | None:
    """The errors of a backend's predictions of a quantity; those of all backends if this one was never
    measured; None: nothing was measured.

    Args:
        errors: by backend and quantity; None: the package's.
    """
    by_backend = packaged_errors() if errors is None else errors
    own = by_backend.get(backend, {}).get(quantity, ())
    every = own or [error for each in by_backend.values() for error in each.get(quantity, ())]
    if not every:
        return None
    low = [-error for error in every if error < -1e-4]
    sizes = [abs(error) for error in every]
    of = f"the backend {backend}" if own else f"all backends (none of {backend})"
    return PastErrors(of, quantity, len(every), median(sizes), max(sizes), len(low), max(low, default=0.0))
