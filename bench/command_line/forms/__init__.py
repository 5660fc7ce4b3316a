"""The forms in which the outputs of commands are printed.

A form is a function ``show(output, out, err)``, which writes an :class:`Output` to ``out``, and text for
people that would disturb programs to ``err``. The form called NAME is the function in the module ``as_NAME``
of this package. Only the module of the chosen form is imported; help needs only the names.
"""

from spbench.impls import FunctionModules

FORMS = FunctionModules(__name__, "as_*", "show", "output forms")
