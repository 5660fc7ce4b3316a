"""A program for torchrun: a sweep of cells whose ranks fail, into the folder of the first argument."""

import sys
from pathlib import Path

from spbench.bench.engines.torchrun import Launched, coordinating, serve
from spbench.bench.sweep.results import ResultsFile
from spbench.bench.sweep.sweep import sweep
from tests.bench import fakes


def main() -> None:
    from tests.bench.sweep.test_rank_faults import cells

    launched = Launched.here()
    if launched.rank:
        serve(launched)
        return
    with coordinating(launched), ResultsFile(Path(sys.argv[1])) as results:
        sweep(cells(), results, run=fakes.faulty)


if __name__ == "__main__":
    main()
