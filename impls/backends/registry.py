"""Data-parallel backends by name: those in the modules of this package, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spbench.impls.discovery import looked_up, named_classes

if TYPE_CHECKING:
    from spbench.impls.backends.backend import Backend

#: used where a cell names no backend
DEFAULT_BACKEND = "legacy_ddp"


def backends() -> Mapping[str, type[Backend]]:
    """Every backend by name; plug-ins add theirs by entry points of the group `spbench.backends`."""
    from spbench.impls.backends.backend import Backend

    return named_classes(__package__, Backend, "spbench.backends")


def backend_class(name: str) -> type[Backend]:
    """The backend of that name.

    Raises:
        KeyError: with the known names, if there is none.
    """
    return looked_up(backends(), name, "backend")
