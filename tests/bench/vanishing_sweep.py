"""A program for torchrun on two hosts: cells of four ranks that never end, then one of two, into the folder
of the first argument; a file ``done`` says that all have rows."""

import sys
from pathlib import Path

from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep
from tests.bench import fakes
from tests.bench.fakes import cell
from tests.bench.faulty_sweep import under_launcher

#: ranks and faults
CELLS = ((4, "hangs"), (4, "hangs too"), (2, ""))


def sweep_into(folder: Path) -> None:
    with ResultsFile(folder) as results:
        sweep(
            [cell(ranks, "distributed", variant=variant) for ranks, variant in CELLS],
            results,
            run=fakes.faulty,
        )
    Path(folder, "done").write_text("done\n")


if __name__ == "__main__":
    under_launcher(lambda: sweep_into(Path(sys.argv[1])))
