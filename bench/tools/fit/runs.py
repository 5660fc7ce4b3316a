"""What workers run for `spbench fit`; torch is imported there, and not where the runs are named."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from spbench.bench.tools.fit.stages import OneStage


def examine(cell: Cell) -> Measurement:
    """As :func:`tools.fit.examine.examine`; of one stage that is traced."""
    from spbench.bench.tools.fit.examine import examine as run
    from spbench.bench.tools.fit.examine import trace_stage

    return trace_stage(cell) if isinstance(cell, OneStage) else run(cell)


def attempt(cell: Cell) -> Measurement:
    """As :func:`tools.fit.examine.attempt`."""
    from spbench.bench.tools.fit.examine import attempt as run

    return run(cell)
