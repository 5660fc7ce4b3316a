"""Strategies, peers and data-parallel backends by name: those in the modules of their packages, and those of
plug-ins. Nothing here imports torch before it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spbench.impls.axes import MESH_AXES
from spbench.impls.discovery import looked_up, named_classes

if TYPE_CHECKING:
    from spbench.impls.as_published.as_published import AsPublished
    from spbench.impls.backends.backend import Backend
    from spbench.impls.peers.peer import Peer
    from spbench.impls.strategies.base import Strategy

#: used where a cell names no backend
DEFAULT_BACKEND = "legacy_ddp"


def strategies() -> Mapping[str, type[Strategy]]:
    """Every strategy by name; plug-ins add theirs by entry points of the group `spbench.strategies`."""
    from spbench.impls.strategies.base import Strategy

    return named_classes("spbench.impls.strategies", Strategy, "spbench.strategies")


def strategy_class(name: str) -> type[Strategy]:
    """The strategy of that name: of :func:`strategies`, of :func:`peers`, installed or not, or of
    :func:`as_published`.

    Raises:
        KeyError: with the known names, if there is none.
    """
    return looked_up({**as_published(), **peers(), **strategies()}, name, "strategy")


def peers() -> Mapping[str, type[Peer]]:
    """Every peer by name, whether or not its package is installed."""
    from spbench.impls.peers.peer import Peer

    return named_classes("spbench.impls.peers", Peer)


def as_published() -> Mapping[str, type[AsPublished]]:
    """Every baseline as its authors ran it, by name; none is a method to use."""
    from spbench.impls.as_published.as_published import AsPublished

    return named_classes("spbench.impls.as_published", AsPublished)


def backends() -> Mapping[str, type[Backend]]:
    """Every backend by name; plug-ins add theirs by entry points of the group `spbench.backends`."""
    from spbench.impls.backends.backend import Backend

    return named_classes("spbench.impls.backends", Backend, "spbench.backends")


def backend_class(name: str) -> type[Backend]:
    """The backend of that name.

    Raises:
        KeyError: with the known names, if there is none.
    """
    return looked_up(backends(), name, "backend")


MESH_AXES.look = strategies  # each brings its axes as it is imported
