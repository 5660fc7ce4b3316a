"""The command `spbench`, with cells that a function of fakes.py measures: to be interrupted and killed."""

import functools
import os

import spbench.bench.sweep.sweep
from spbench.bench.cli import main
from tests.bench import fakes

if __name__ == "__main__":
    run = getattr(fakes, os.environ[fakes.RUN])
    spbench.bench.sweep.sweep.sweep = functools.partial(spbench.bench.sweep.sweep.sweep, run=run)
    main()
