"""How long a traced step takes on the cell's cluster: the timeline's answer, as a measurement holds it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from spbench.bench.cell import Cell, Measurement
from spbench.bench.config.cluster import Calibration, load_cluster
from spbench.bench.engines.setup import model_parameters
from spbench.bench.simulator.costs import RatesUnknown, check_rates
from spbench.bench.simulator.program import Program
from spbench.bench.simulator.simulate import simulate


def can_time(cell: Cell) -> bool:
    """Whether the cell's cluster has the figures that a time needs."""
    try:
        check_rates(load_cluster(cell.cluster), cell.precision, cell.sizes.world)
    except RatesUnknown:
        return False
    return True


def add_times(
    measurement: Measurement, cell: Cell, programs: Sequence[Program], ranks_of: Sequence[Sequence[int]]
) -> None:
    """Fill in step time, throughput and breakdown from the programs of the cell's ranks."""
    cluster = load_cluster(cell.cluster)
    timeline = simulate(programs, ranks_of, cluster, cell.precision, parameters=model_parameters(cell))
    measurement.step_time_s = timeline.step_time_s
    measurement.tokens_per_s = prod(cell.shape) / timeline.step_time_s
    measurement.samples_per_s = cell.shape[0] / timeline.step_time_s
    measurement.breakdown = timeline.breakdown
    measurement.calibration = cluster.calibration.get(cell.precision, Calibration()).label
