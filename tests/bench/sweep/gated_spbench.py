"""The command `spbench`, with cells that end when a file says so: to be interrupted and killed.

Its server imports what workers need (torch), not what real cells need, which takes as long again.
"""

import functools

import spbench.bench.processes
import spbench.bench.sweep.sweep
from spbench.bench.cli import main
from tests.bench.fakes import gated

if __name__ == "__main__":
    spbench.bench.sweep.sweep.sweep = functools.partial(spbench.bench.sweep.sweep.sweep, run=gated)
    spbench.bench.processes._PRELOADED = "spbench.bench.engines.trace_cache"
    main()
