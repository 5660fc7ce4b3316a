"""Strategies by name: those in the modules of this package, those of plug-ins, and the peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spbench.impls.discovery import looked_up, named_classes

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy


def strategies() -> Mapping[str, type[Strategy]]:
    """Every strategy by name; plug-ins add theirs by entry points of the group `spbench.strategies`."""
    from spbench.impls.strategies.base import Strategy

    return named_classes(__package__, Strategy, "spbench.strategies")


def strategy_class(name: str) -> type[Strategy]:
    """The strategy of that name: of :func:`strategies`, or a peer (:mod:`spbench.impls.peers`), installed or
    not.

    Raises:
        KeyError: with the known names, if there is none.
    """
    from spbench.impls.peers.registry import peers

    return looked_up({**peers(), **strategies()}, name, "strategy")
