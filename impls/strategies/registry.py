"""Strategies by name: those in the modules of this package, and those of plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from spbench.impls.discovery import named_classes
from spbench.impls.strategies.base import Strategy


def strategies() -> Mapping[str, type[Strategy]]:
    """Every strategy by name; plug-ins add theirs by entry points of the group `spbench.strategies`."""
    return named_classes(__package__, Strategy, "spbench.strategies")


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
