"""The engines: each measures a cell with ``run(cell) -> Measurement``."""

from __future__ import annotations

from spbench.bench.cell import Cell, Measurement


def run(cell: Cell) -> Measurement:
    """Measure a cell, or answer its search, on its engine.

    Raises:
        Unsupported: the strategy cannot run these sizes, with the reason and the nearest that work.
    """
    from spbench.bench.engines import distributed, learning, virtual
    from spbench.bench.search.boundary import largest_that_fits

    if cell.search is not None:
        return largest_that_fits(cell)
    if cell.learning is not None:
        return learning.run(cell)
    return {"virtual": virtual, "distributed": distributed}[cell.engine].run(cell)
