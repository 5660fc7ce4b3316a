"""Rates of clusters: fitted to published cells, measured on this machine, or read from logs of benchmarks.

A kind of log is a function ``read(log)`` that makes :class:`Findings` of a :class:`LogFile`. The function
returns None for a log of another kind, and raises a UserError for a damaged log of its own kind. The kind
called NAME is such a function in a module ``from_NAME`` of this package (with ``_`` for each ``-``).
"""

from spbench.impls import FunctionModules

LOGS = FunctionModules(__name__, "from_*", "read", "logs")
