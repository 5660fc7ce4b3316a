"""What the server that workers and ranks are forked from imports last (:mod:`measure.processes.starting`);
this makes it one, so no other process may import it."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

from spbench.bench.measure.processes.starting import server_is_ready

# the signals on which a worker and all that it has started write what they do; the server does nothing
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
gc.freeze()  # no process looks for garbage in what has been imported
atexit.register(os._exit, 0)  # taking all of torch apart would take half a second
server_is_ready()
# what is buffered would be printed by each process that is forked
sys.stdout.flush()
sys.stderr.flush()
