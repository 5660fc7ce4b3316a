"""What the server that workers and ranks are forked from imports (:mod:`measure.processes.starting`): all
that a cell needs, so that no process imports it again. Nothing is computed here, which could start threads.

Plug-ins are left out, as nothing is known of what they do when they are imported. This module is in no room
whose modules are found by being there: each process that looks would import torch's compiler with it.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
from contextlib import suppress

#: packages of which each module is found by being there; these import all of this room
_ROOMS = (
    *("impls.strategies", "impls.models", "impls.backends", "impls.training"),
    *(f"bench.measure.{room}" for room in ("engines", "trace", "simulator", "clusters", "sweep")),
)

_collecting = gc.isenabled()
gc.disable()  # all stays, and a quarter of the time would go to looking for garbage among it
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
