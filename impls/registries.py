"""Strategies, peers and data-parallel backends by name: those in the modules of their packages, and those of
plug-ins; and whether what peers require is installed. Nothing here imports torch before it is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from spbench.impls.axes import MESH_AXES
from spbench.impls.discovery import installed_version, looked_up, named_classes

if TYPE_CHECKING:
    from spbench.impls.as_published.as_published import AsPublished
    from spbench.impls.backends.backend import Backend
    from spbench.impls.dispatchers.dispatcher import Dispatcher
    from spbench.impls.peers.peer import Peer
    from spbench.impls.strategies.base import Strategy

#: used where a cell names no backend
DEFAULT_BACKEND = "legacy_ddp"

#: how to mend that a peer's package is missing
INSTALL = "install the extra peers: pip install 'spbench[peers]'"


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


def versions(requires: Iterable[str]) -> dict[str, str | None]:
    """The versions of distributions, by their names in :attr:`Strategy.requires`; None: not installed."""
    return {name: installed_version(name) for name in requires}


def absent(requires: Iterable[str]) -> list[str]:
    """Those of the distributions that are not installed."""
    return [name for name, found in versions(requires).items() if found is None]


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


def dispatchers() -> Mapping[str, type[Dispatcher]]:
    """Every dispatcher of tokens to experts by name; plug-ins add theirs by entry points of the group
    `spbench.dispatchers`."""
    from spbench.impls.dispatchers.dispatcher import Dispatcher

    return named_classes("spbench.impls.dispatchers", Dispatcher, "spbench.dispatchers")


MESH_AXES.look = strategies  # each brings its axes as it is imported
