"""The command `spbench`, with cells that end when a file says so: to be interrupted and killed."""

import functools

import spbench.bench.commands
from spbench.bench.cli import main
from tests.bench.fakes import gated

if __name__ == "__main__":
    spbench.bench.commands.sweep = functools.partial(spbench.bench.commands.sweep, run=gated)
    main()
