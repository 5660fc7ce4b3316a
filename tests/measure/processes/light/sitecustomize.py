"""With this folder on PYTHONPATH, workers of sweeps start without torch, which tests of faults do not need.

The rest of a sweep is as it is: the command, workers, the server they are forked from, and the results file.
"""

import spbench.bench.measure.processes.starting

spbench.bench.measure.processes.starting._PRELOADED = "tests.measure.processes.light_server"
