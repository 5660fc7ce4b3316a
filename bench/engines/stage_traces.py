"""A cell traced once for each set of ranks that run the same program, and its timeline on a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from spbench.bench.cell import Cell
from spbench.bench.config.cluster import Cluster
from spbench.bench.engines import virtual
from spbench.bench.engines.setup import alike_ranks, model_parameters
from spbench.bench.meters.recorder import Recorder
from spbench.bench.simulator.simulate import Simulator


def stage_traces(cell: Cell) -> list[Recorder]:
    """What the first rank of each set does, with the order of events.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    return [virtual.trace(cell, alike.ranks[0], timeline=True) for alike in alike_ranks(cell)]


def simulator_of(cell: Cell, recorders: Sequence[Recorder], cluster: Cluster) -> Simulator:
    """The world that these traces stand for.

    Raises:
        RatesUnknown: the cluster lacks a figure.
    """
    programs = [recorder.timeline.program() for recorder in recorders if recorder.timeline is not None]
    members = [alike.ranks for alike in alike_ranks(cell)]
    return Simulator(programs, members, cluster, cell.precision, model_parameters(cell))
