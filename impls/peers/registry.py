"""The peers by name, and whether what they require is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from spbench.impls.discovery import named_classes

if TYPE_CHECKING:
    from spbench.impls.peers.peer import Peer

#: how to mend that a peer's package is missing
INSTALL = "install the extra peers: pip install 'spbench[peers]'"


def peers() -> Mapping[str, type[Peer]]:
    """Every peer by name, whether or not its package is installed: the strategies in the modules of this
    package."""
    from spbench.impls.peers.peer import Peer

    return named_classes(__package__, Peer)


def versions(requires: Iterable[str]) -> dict[str, str | None]:
    """The versions of distributions, by their names in :attr:`Strategy.requires`; None: not installed."""
    return {name: _version(name) for name in requires}


def absent(requires: Iterable[str]) -> list[str]:
    """Those of the distributions that are not installed."""
    return [name for name, found in versions(requires).items() if found is None]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
