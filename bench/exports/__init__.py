"""Exports: results as the files that dashboards and CI systems read.

An export is a function ``export(request)`` that makes an :class:`Exported` of an :class:`ExportRequest`. The
export called NAME is such a function in a module ``to_NAME`` of this package (with ``_`` for each ``-``), or
of another distribution in an entry point NAME of the group ``spbench.exports``. Only the one that is chosen
is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spbench.impls.discovery import FunctionModules

if TYPE_CHECKING:
    from spbench.bench.exports.exported import Exported, ExportRequest

    Export = Callable[[ExportRequest], Exported]

EXPORTS = FunctionModules(__name__, "to_", "export", "spbench.exports", "exports")


def export_names() -> list[str]:
    """The names of all exports, in alphabetical order."""
    return EXPORTS.names()


def load_export(name: str) -> Export:
    """The export of that name.

    Raises:
        DiscoveryError: no export or several have that name, or its module cannot be imported.
    """
    return EXPORTS.load(name)
