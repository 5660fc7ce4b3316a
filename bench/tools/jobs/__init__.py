"""Jobs of training programs as scenarios: every argument is mapped, without effect, or refused by name.

A kind of job is a function ``read(files)`` that makes a :class:`Job` of :class:`JobFiles`, or returns None
where they are of another kind. The kind called NAME is such a function in the module NAME of this package,
or of another distribution in an entry point NAME of the group ``spbench.jobs``.

The way back is a function ``flags(cell)`` that makes :class:`Flags`, in the module to_NAME;
:func:`program_flags` proves and completes what it returns.
"""

from __future__ import annotations

from spbench.impls import FunctionModules

JOBS = FunctionModules(__name__, "*", "read", "jobs", "spbench.jobs")
FLAGS = FunctionModules(__name__, "to_*", "flags", "flags")
