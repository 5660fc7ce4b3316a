"""The peers by name: the strategies in the modules of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spbench.impls.discovery import named_classes

if TYPE_CHECKING:
    from spbench.impls.peers.peer import Peer


def peers() -> Mapping[str, type[Peer]]:
    """Every peer by name, whether or not its package is installed (:meth:`Peer.missing`)."""
    from spbench.impls.peers.peer import Peer

    return named_classes(__package__, Peer)
