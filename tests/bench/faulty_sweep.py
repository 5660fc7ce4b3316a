"""A program, for torchrun too: a sweep of cells whose ranks fail, into the folder of the first argument; the
further arguments choose among the faults."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from spbench.bench.measure.processes.rank_agent import Launched, serve
from spbench.bench.measure.processes.torchrun import coordinating
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep
from tests.bench import fakes


def under_launcher(work: Callable[[], None]) -> None:
    """Do this in the first of a launcher's processes, on the ranks of all of them, or in this one."""
    if "RANK" not in os.environ:
        work()
        return
    launched = Launched.here()
    if launched.rank:
        serve(launched)
    else:
        with coordinating(launched):
            work()


def sweep_into(folder: Path, *faults: str) -> None:
    from tests.measure.sweep.test_sweep import cells

    with ResultsFile(folder) as results:
        sweep(cells(*faults), results, run=fakes.faulty)


if __name__ == "__main__":
    under_launcher(lambda: sweep_into(Path(sys.argv[1]), *sys.argv[2:]))
