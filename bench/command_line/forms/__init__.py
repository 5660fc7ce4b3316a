"""The forms in which the outputs of commands are printed.

A form is a function ``show(output, out, err)``: it writes an :class:`Output` to ``out`` and what does not
belong there to ``err``. The form called NAME is such a function in a module ``as_NAME`` of this package. Only
the form that is chosen is imported, as every command needs the names for its help.
"""

from __future__ import annotations

from spbench.impls import FunctionModules

FORMS = FunctionModules(__name__, "as_*", "show", "output forms")
