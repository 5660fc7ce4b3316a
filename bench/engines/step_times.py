"""The time of a step in a measurement: what it is made of, what bounds it, and what rates it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.engines.model_flops import checked_flops, model_flops
from spbench.bench.measurement import Measurement
from spbench.bench.simulator.costs import RatesUnknown, check_rates
from spbench.impls.models.model import model_preset

if TYPE_CHECKING:
    from spbench.bench.cell import Cell
    from spbench.bench.simulator.timeline import Timeline

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
    measurement: Measurement, cell: Cell, step_time_s: float, breakdown: Mapping[str, float] | None = None
) -> None:
    """Set the step time, and throughput in tokens of the model and in samples of the whole batch; of a
    simulated time also what it is made of, and what its cluster's rates are."""
    measurement.step_time_s = step_time_s
    measurement.tokens_per_s = model_preset(*cell.model_arguments).tokens(*cell.shape) / step_time_s
    measurement.samples_per_s = cell.shape[0] / step_time_s
    if breakdown is not None:
        cluster = load_cluster(cell.cluster)
        measurement.breakdown = dict(breakdown)
        measurement.calibration = cluster.calibration_of(cell.precision).label
        measurement.rates = cluster.rates_of(cell.precision)


def add_simulated_time(measurement: Measurement, cell: Cell, timeline: Timeline) -> None:
    """Set the step time of a simulation, what it is made of, and what bounds it."""
    add_step_time(measurement, cell, timeline.step_time_s, timeline.breakdown)
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
