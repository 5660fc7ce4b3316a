"""The last import of the server from which workers and ranks are forked (:mod:`measure.processes.starting`).
It makes a process that server, so no other process may import this module."""

import atexit
import gc
import os
import signal
import sys

from spbench.bench.measure.processes.starting import server_is_ready

# on these signals workers and ranks write their stacks and collectives; the server does nothing
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
gc.freeze()  # no process looks for garbage among imported objects
atexit.register(os._exit, 0)  # taking all of torch apart would take half a second
server_is_ready()
# each forked process would print text that is still in the buffers
sys.stdout.flush()
sys.stderr.flush()
