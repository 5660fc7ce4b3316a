"""The imports of the server from which workers and ranks are forked (:mod:`measure.processes.starting`): all
modules that a cell needs, so that no process imports them again. This module computes nothing, because that
could start threads. Plug-ins are left out, because their import may do anything. This module is in no package
whose modules are all imported, for that would import torch's compiler in each process.
"""

import gc
import importlib
import pkgutil
from contextlib import suppress

#: packages of which each module is imported
_ROOMS = (
    *("impls.strategies", "impls.models", "impls.backends", "impls.training"),
    *(f"bench.measure.{room}" for room in ("engines", "trace", "simulator", "clusters", "sweep")),
)

_collecting = gc.isenabled()
gc.disable()  # all objects stay, and a collection would take a quarter of the time
try:
    for _room in _ROOMS:
        for _module in pkgutil.iter_modules(importlib.import_module(f"spbench.{_room}").__path__):
            with suppress(Exception, SystemExit):  # the process that needs it meets its error, and says so
                importlib.import_module(f"spbench.{_room}.{_module.name}")
    with suppress(Exception):
        # its first construction imports torch._dynamo and sympy, for more than a second
        importlib.import_module("spbench.bench.measure.trace.torch_internals").FakeTensorMode()
finally:
    if _collecting:
        gc.enable()
