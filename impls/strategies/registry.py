"""The registry of strategies: the modules of this package, and other people's entry points."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from spbench.impls.strategies.base import Strategy


@cache
def strategies() -> dict[str, type[Strategy]]:
    """Every strategy by name: the modules of this package, then the entry points `spbench.strategies`."""
    import spbench.impls.strategies as package

    found: dict[str, type[Strategy]] = {Strategy.name: Strategy}
    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
                if inspect.isclass(value) and issubclass(value, Strategy) and "name" in vars(value):
                    found[value.name] = value
    for entry in entry_points(group="spbench.strategies"):
        loaded = entry.load()
        found[loaded.name] = loaded
    return found


def strategy_class(name: str) -> type[Strategy]:
    """The strategy of that name.

    Raises:
        KeyError: with the known names, if there is none.
    """
    known = strategies()
    if name not in known:
        raise KeyError(f"unknown strategy {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def strategy_options(cls: type[Strategy]) -> dict[str, Any]:
    """The options a strategy takes beside the mesh and the seed, with their defaults."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.name != "self" and p.name not in ("mesh", "planned_size", "seed", "planned_rank")
    }
