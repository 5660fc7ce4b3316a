"""A module that worker processes import for a second; the process that starts them at once."""

import multiprocessing
import time

from spbench.bench.cell import Cell
from spbench.bench.measurement import Measurement
from tests.bench.fakes import answer

#: seconds
IMPORT_S = 1.0

if multiprocessing.parent_process() is not None:
    time.sleep(IMPORT_S)


def run(cell: Cell) -> Measurement:
    """As :func:`answer`."""
    return answer(cell)
