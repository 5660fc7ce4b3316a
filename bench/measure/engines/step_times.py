"""The time of a step in a measurement: what it is made of, what bounds it, and what rates it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.model_flops import checked_flops, model_flops
from spbench.bench.measure.simulator.costs import RatesUnknown, check_rates
from spbench.bench.measure.simulator.substitutes import Substitute
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measurement import Measurement
from spbench.impls.models.model import model_preset

#: the least share of a step for which it is named what some work is priced by
NAMED = 0.01
#: the grades of such prices, the worst first, and the least share of a step with which each makes the class
#: of its time. Of work without any rate a small share is little only by its price, which may be much too low
COUNTS = {"substituted": NAMED, "transferred": 0.05, "extrapolated": 0.05}

#: what can bound a step, by the names of :attr:`Measurement.parts` and :attr:`Measurement.breakdown`
BOUNDS = {
    "products": ("products_s",),
    "attention": ("attention_s",),
    "memory": ("memory_bound_s",),
    "links within a node": ("within_nodes_s",),
    "links across nodes": ("across_nodes_s",),
    "bubble": ("bubble_s",),
    "host": ("overhead_s", "host_s"),
}


def add_step_time(
    measurement: Measurement,
    cell: Cell,
    step_time_s: float,
    breakdown: Mapping[str, float] | None = None,
    priced_by: Mapping[Substitute, float] = MappingProxyType({}),
) -> None:
    """Set the step time, and throughput in tokens of the model and in samples of the whole batch; of a
    simulated time also what it is made of, and what its cluster's rates are.

    Args:
        priced_by: of a simulated time, seconds of what is priced by something else than a rate of its own.
    """
    measurement.step_time_s = step_time_s
    measurement.tokens_per_s = model_preset(*cell.model_arguments).tokens(*cell.shape) / step_time_s
    measurement.samples_per_s = cell.shape[0] / step_time_s
    if breakdown is not None:
        cluster = load_cluster(cell.cluster)
        measurement.breakdown = dict(breakdown)
        measurement.calibration = cluster.calibration_of(cell.precision).label
        measurement.rates = cluster.rates_of(cell.precision)
        if measurement.rates != "datasheet":  # of which all is priced by the datasheet
            measurement.priced_by = _by_share(priced_by, step_time_s)
            measurement.rates = rates_of_step(measurement.rates, measurement.priced_by)


def _by_share(seconds: Mapping[Substitute, float], step_time_s: float) -> list[dict[str, Any]]:
    """As :attr:`Measurement.priced_by`, without what takes too little to be named."""
    shares = {each: min(1.0, s / step_time_s) for each, s in seconds.items() if s >= NAMED * step_time_s}
    ordered = sorted(shares, key=lambda each: (-shares[each], each))
    return [{**each._asdict(), "share": shares[each]} for each in ordered]


def rates_of_step(of_cluster: str, priced_by: Sequence[Mapping[str, Any]]) -> str:
    """What the rates of a step are: the worst grade of what is priced by something else, as far as that takes
    a part of the step that counts, or what those of the cluster are where there is none. A scalar that was
    fitted to steps has taken up what their kernels were priced by: "fitted" stays.

    Args:
        of_cluster: see :meth:`Cluster.rates_of`.
        priced_by: as :attr:`Measurement.priced_by`.
    """
    if of_cluster != "sourced":
        return of_cluster
    shares: Counter[str] = Counter()
    for each in priced_by:
        shares[each["grade"]] += each["share"]
    return next((grade for grade, least in COUNTS.items() if shares[grade] >= least), of_cluster)


def add_simulated_time(measurement: Measurement, cell: Cell, timeline: Timeline) -> None:
    """Set the step time of a simulation, what it is made of, and what bounds it."""
    add_step_time(measurement, cell, timeline.step_time_s, timeline.breakdown, timeline.priced_by)
    measurement.parts = timeline.parts
    measurement.bound = bound_of({**measurement.breakdown, **measurement.parts})
    measurement.mfu = utilization(cell, timeline.step_time_s)
    measurement.flops, wrong = checked_flops(cell, timeline.flops)
    if wrong and measurement.status == "ok":
        measurement.status, measurement.reason = "mismatch", wrong


def bound_of(seconds: Mapping[str, float]) -> str:
    """The one of :data:`BOUNDS` that takes most of a step, of several the first; "" of a step of no time.

    Args:
        seconds: of the parts of a step; one that is absent takes none.
    """
    taken = {name: sum(seconds.get(part, 0.0) for part in of) for name, of in BOUNDS.items()}
    most = max(taken, key=taken.__getitem__)
    return most if taken[most] > 0 else ""


def utilization(cell: Cell, step_time_s: float) -> float | None:
    """The FLOPs of a step's model (:func:`model_flops`) over what the ranks' datasheet promises in the time,
    from 0 to 1; None where the datasheet's figure is not known. So for one model and length it goes as the
    throughput of a GPU, whatever the strategy."""
    peaks = load_cluster(cell.cluster).device.peak_flops_per_s
    peak = next((figure.value for name, figure in peaks.items() if name == cell.precision), None)
    if not peak or step_time_s <= 0:
        return None
    return model_flops(cell) / (step_time_s * peak * cell.sizes.world)


def can_time(cell: Cell) -> bool:
    """Whether the cell's cluster has the figures that a time needs."""
    try:
        check_rates(load_cluster(cell.cluster), cell.precision, cell.sizes.world)
    except RatesUnknown:
        return False
    return True
