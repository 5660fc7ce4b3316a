"""Rates of clusters: fitted to published cells, measured on this machine, or read from logs of benchmarks.

A kind of log is a function ``read(log)`` that makes :class:`Findings` of a :class:`LogFile`, or returns None
where the content is of another kind; one that is of its kind but damaged is a UserError. The kind called NAME
is such a function in a module ``from_NAME`` of this package (with ``_`` for each ``-``).
"""

from __future__ import annotations

from spbench.impls import FunctionModules

LOGS = FunctionModules(__name__, "from_*", "read", "logs")
