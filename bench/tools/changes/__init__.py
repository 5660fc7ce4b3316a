"""Exports: results as the files that dashboards and CI systems read.

An export is a function ``export(request)`` that makes an :class:`Exported` of an :class:`ExportRequest`. The
export called NAME is such a function in a module ``to_NAME`` of this package (with ``_`` for each ``-``).
Only the one that is chosen is imported.
"""

from __future__ import annotations

from spbench.impls import FunctionModules

EXPORTS = FunctionModules(__name__, "to_*", "export", "exports")
