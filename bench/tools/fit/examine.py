"""The functions that workers run for `spbench fit`: a cell taken apart, and a change tried after a guess."""

from __future__ import annotations

import math

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.engines.extrapolate import PeakModel
from spbench.bench.measure.engines.plan import rank_classes, usable_memory_bytes
from spbench.bench.measure.engines.rank_memory import allocator_of
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Measurement
from spbench.bench.tools.fit.anatomy import ANATOMY, anatomy, fullest, plain
from spbench.bench.units import GIB
from spbench.impls.models.model import model_preset

#: a change is not traced whole where small traces say that it needs more than so much of the card
_PLAINLY_TOO_MUCH = 1.1
#: layers of a stage by which it is checked what fewer say, and how near they must come
_CHECKED, _NEAR = 4, 0.01


def examine(cell: Cell) -> Measurement:
    """Measure a cell, also its time where it does not fit; ``meters`` have the :class:`Anatomy` of the class
    of ranks that is closest to not fitting, or furthest beyond it.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    traces = virtual.trace_classes(cell, events=can_time(cell))
    found = traces.memory_measurement()
    traces.add_time(found)
    at, least = fullest(traces)
    ranks, log = traces.classes[at], traces.traces[at].memory
    stage = ranks.stage.index if ranks.stage.count > 1 else None
    taken_apart = anatomy(log, allocator_of(cell), least, ranks.ranks, stage)
    found.meters = {**found.meters, ANATOMY: plain(taken_apart)}
    return found


def trace_stage(cell: Cell, stage: int) -> Measurement:
    """Trace the first rank of a stage; the trace is kept on disk, for :func:`examine` of the cell."""
    first = next(each.first for each in rank_classes(cell) if each.stage.index == stage)
    tracing.trace(cell, first, events=can_time(cell))
    return Measurement()


def attempt(cell: Cell) -> Measurement:
    """Search where the cell asks for that, else :func:`examine` it. Where a guess from few layers exceeds the
    card by 10%, returns the status oom with that peak, and traces no more."""
    if cell.search is not None:
        return run_cell(cell)
    usable = usable_memory_bytes(cell)
    estimate = shallow_peak(cell)
    if usable is not None and estimate is not None and estimate > _PLAINLY_TOO_MUCH * usable:
        reason = f"about {estimate / GIB:.0f} GiB by traces of few layers"
        return Measurement(
            status="oom", reason=reason, peak_memory_bytes=estimate, usable_memory_bytes=usable
        )
    return examine(cell)


def shallow_peak(cell: Cell) -> int | None:
    """The peak of the first class of ranks, in bytes, extrapolated from stages of two and three layers; None:
    four layers have another peak than these predict, or there are no more layers than four."""
    model = model_preset(*cell.model_arguments)
    if getattr(model, "recompute_method", "") == "block":
        stages = cell.sizes.pp * cell.training.virtual_stages
        recomputed: int = getattr(model, "recompute_layers", 1) * stages
        return _peak_between(cell, min(1.0, recomputed / getattr(model, "layers", 1)))
    # a stage is whole runs of layers that are computed again together, of which more and more are alike
    unit = cell.sizes.pp * math.lcm(getattr(model, "recompute_layers", 1), model.period)
    layers = getattr(model, "layers", 0) // unit
    if layers <= _CHECKED or (model.period > 1 and model.layers % unit):  # type: ignore[attr-defined]
        return None

    def trace(_: int, depth: int | None) -> MemoryLog:
        options = {**cell.model_options, "layers": (depth or 1) * unit}
        made = cell.model_copy(update={"model_options": options})
        return tracing.trace(made, rank_classes(made)[0].first).memory

    checked = trace(1, _CHECKED).peak().nbytes
    if abs(PeakModel(trace, [1], _CHECKED)(1) / checked - 1) > _NEAR:
        return None
    return PeakModel(trace, [1], layers)(1)


def _peak_between(cell: Cell, part: float) -> int | None:
    """As :func:`shallow_peak`, where this part of each stage's layers is recomputed: as far between the peaks
    where none and where all of them are, which is too much by at most a layer's activations."""
    options = cell.model_options
    without = {name: value for name, value in options.items() if not name.startswith("recompute")}
    whole = {**options, "recompute_method": "uniform", "recompute_layers": 1}
    none, all_ = (shallow_peak(cell.model_copy(update={"model_options": o})) for o in (without, whole))
    return None if none is None or all_ is None else round(none + part * (all_ - none))
