"""A module that worker processes cannot import; the process that starts them can."""

import multiprocessing

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from tests.bench.fakes import answer

if multiprocessing.parent_process() is not None:
    raise ImportError("no such luck")


def run(cell: Cell) -> Measurement:
    """As :func:`answer`."""
    return answer(cell)
