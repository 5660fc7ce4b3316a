"""Exports: results as the files that dashboards and CI systems read.

An export is a function ``export(request)`` that returns an :class:`Exported` for an :class:`ExportRequest`.
The export called NAME is the function in the module ``to_NAME`` of this package (with ``_`` for each ``-``).
Only the module of the chosen export is imported.
"""

from spbench.impls import FunctionModules

EXPORTS = FunctionModules(__name__, "to_*", "export", "exports")
