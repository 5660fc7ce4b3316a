"""The functions that workers run for `spbench fit`: a cell taken apart, and a change tried after a guess."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.engines.plan import rank_classes, usable_memory_bytes
from spbench.bench.measure.engines.rank_memory import allocator_of
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.step_times import can_time
from spbench.bench.measurement import Measurement
from spbench.bench.tools.fit.anatomy import ANATOMY, anatomy, fullest, plain
from spbench.bench.units import GIB

#: a change is traced no further where the guess needs more than so much of the card
_PLAINLY_TOO_MUCH = 1.1


def examine(cell: Cell) -> Measurement:
    """Measure a cell, also its time where it does not fit; ``meters`` have the :class:`Anatomy` of the class
    of ranks that is closest to not fitting, or furthest beyond it.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    traces = virtual.trace_classes(cell, events=can_time(cell))
    measurement = traces.memory_measurement()
    traces.add_time(measurement)
    at, least = fullest(traces)
    ranks, log = traces.classes[at], traces.traces[at].memory
    stage = ranks.stage.index if ranks.stage.count > 1 else None
    taken_apart = anatomy(log, allocator_of(cell), least, ranks.ranks, stage)
    measurement.meters = {**measurement.meters, ANATOMY: plain(taken_apart)}
    return measurement


def trace_stage(cell: Cell, stage: int) -> Measurement:
    """Trace the first rank of a stage; the trace is kept on disk, for :func:`examine` of the cell."""
    first = next(each.first for each in rank_classes(cell) if each.stage.index == stage)
    tracing.trace(cell, first, events=can_time(cell))
    return Measurement()


def attempt(cell: Cell) -> Measurement:
    """Search where the cell asks for that, else :func:`examine` it. Where the guessed peak of the first class
    of ranks exceeds the card by 10%, returns the status oom with that peak, and traces no more."""
    if cell.search is not None:
        return run_cell(cell)
    usable = usable_memory_bytes(cell)
    if usable is not None:
        # where no guess can be put together, this is the whole trace, which is kept on disk for `examine`
        guess = tracing.trace(cell, rank_classes(cell)[0].first, events=can_time(cell), effort="guess")
        peak = guess.memory.peak().nbytes
        if peak > _PLAINLY_TOO_MUCH * usable:
            reason = f"needs about {peak / GIB:.0f} GiB"
            return Measurement(
                status="oom", reason=reason, peak_memory_bytes=peak, usable_memory_bytes=usable
            )
    return examine(cell)
