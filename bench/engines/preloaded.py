"""What the server that workers and ranks are forked from imports (:mod:`bench.ranks.processes`): all that a
cell needs, so that no process imports it again. Nothing is computed here, which could start threads.

Plug-ins are left out, as nothing is known of what they do when they are imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from contextlib import suppress

from spbench.bench.ranks.processes import server_is_ready

# the signals on which a worker and all that it has started write what they do; the server does nothing
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)

#: packages of which each module is found by being there
_ROOMS = (
    *("impls.strategies", "impls.models", "impls.backends", "impls.training"),
    *("bench.engines", "bench.ranks", "bench.meters", "bench.search", "bench.simulator"),
    *("bench.clusters", "bench.sweep", "bench.workers"),
)

for _room in _ROOMS:
    for _module in pkgutil.iter_modules(importlib.import_module(f"spbench.{_room}").__path__):
        with suppress(Exception):  # the process that needs it meets its error, and says so
            importlib.import_module(f"spbench.{_room}.{_module.name}")

with suppress(Exception):
    from spbench.bench.meters.torch_internals import FakeTensorMode

    FakeTensorMode()  # its first construction imports torch._dynamo and sympy, for more than a second

server_is_ready()
# what is buffered would be printed by each process that is forked
sys.stdout.flush()
sys.stderr.flush()
