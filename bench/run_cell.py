"""How a cell is measured: by its engine, as a step, a search or a training run."""

from __future__ import annotations

from spbench.bench.cell import Cell, Measurement
from spbench.bench.engines.engine import engine_class


def run_cell(cell: Cell) -> Measurement:
    """What a cell asks for, by its engine.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the engine not what is asked.
    """
    engine = engine_class(cell.engine)()
    if cell.search is not None:
        from spbench.bench.search.search import search  # torch, which a sweep's own process does without

        return search(cell, engine)
    if cell.learning is not None:
        return engine.learn(cell)
    return engine.measure(cell)
