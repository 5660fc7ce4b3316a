"""With this folder on PYTHONPATH, workers of sweeps start without torch, which tests of faults do not need.

The rest of a sweep is as it is: the command, workers, the server they are forked from, and the results file.
"""

import spbench.bench.ranks.processes

spbench.bench.ranks.processes._PRELOADED = "tests.bench.workers.light_server"
