"""The forms in which reports are printed.

A form is a function ``show(output, out, err)``: it writes an :class:`Output` to ``out`` and what does not
belong there to ``err``. The form called NAME is such a function in a module ``as_NAME`` of this package, or
of another distribution in an entry point NAME of the group ``spbench.forms``. Only the form that is chosen is
imported, as every command needs the names for its help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from spbench.bench.commands.output import Output
from spbench.impls.discovery import FunctionModules

Form = Callable[[Output, TextIO, TextIO], None]

_FORMS = FunctionModules(__name__, "as_", "show", "spbench.forms", "output forms")


def form_names() -> list[str]:
    """The names of all forms, in alphabetical order."""
    return _FORMS.names()


def load_form(name: str) -> Form:
    """The form of that name.

    Raises:
        DiscoveryError: no form or several have that name, or its module cannot be imported.
    """
    return _FORMS.load(name)
