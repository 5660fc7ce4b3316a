"""The command `spbench`, with cells that end when a file says so: to be interrupted and killed."""

import functools

import bench.commands
from bench.cli import main
from tests.bench.fakes import gated

if __name__ == "__main__":
    bench.commands.sweep = functools.partial(bench.commands.sweep, run=gated)
    main()
