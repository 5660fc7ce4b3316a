"""The command `spbench`, with cells that end when a file says so: to be interrupted and killed."""

import functools

import spbench.bench.commands.run
from spbench.bench.cli import main
from tests.bench.fakes import gated

if __name__ == "__main__":
    spbench.bench.commands.run.sweep = functools.partial(spbench.bench.commands.run.sweep, run=gated)
    main()
