"""A cell traced once for each pipeline stage, and its timeline on a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cell import Cell
from bench.cluster import Cluster
from bench.engines import virtual
from bench.engines.program import stage_members
from bench.meters.recorder import Recorder
from bench.simulate import Simulator


def stage_traces(cell: Cell) -> list[Recorder]:
    """What the first rank of each stage does, with the order of events.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    return [virtual.trace(cell, ranks[0], timeline=True) for ranks in stage_members(cell.sizes)]


def simulator_of(cell: Cell, recorders: Sequence[Recorder], cluster: Cluster) -> Simulator:
    """The world that these traces stand for.

    Raises:
        RatesUnknown: the cluster lacks a figure.
    """
    programs = [recorder.timeline.program() for recorder in recorders if recorder.timeline is not None]
    return Simulator(programs, stage_members(cell.sizes), cluster, cell.precision)
