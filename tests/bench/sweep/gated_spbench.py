"""The command `spbench`, with cells that end when a file says so: to be interrupted and killed."""

import functools

import spbench.bench.sweep.sweep
from spbench.bench.cli import main
from tests.bench.gates import gated

if __name__ == "__main__":
    spbench.bench.sweep.sweep.sweep = functools.partial(spbench.bench.sweep.sweep.sweep, run=gated)
    main()
