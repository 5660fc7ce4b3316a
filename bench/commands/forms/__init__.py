"""The forms in which reports are printed.

A form is a function ``show(report, out, err)``: it writes a :class:`Report` to ``out`` and what does not
belong there to ``err``. The form called NAME is such a function in a module ``as_NAME`` of this package, or
of another distribution in an entry point NAME of the group ``spbench.forms``. Only the form that is chosen is
imported, as every command needs the names for its help.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TextIO

from spbench.bench.commands.command_report import Report
from spbench.bench.errors import UserError

GROUP = "spbench.forms"
_PREFIX = "as_"

Form = Callable[[Report, TextIO, TextIO], None]


def form_names() -> list[str]:
    """The names of all forms, in alphabetical order."""
    return sorted({place.name for place in _places()})


def load_form(name: str) -> Form:
    """The form of that name.

    Raises:
        UserError: no form or several have that name, or its module cannot be imported.
    """
    found = [place for place in _places() if place.name == name]
    if len(found) != 1:
        places = " and ".join(place.value for place in found) or "none is installed"
        raise UserError(f"{len(found)} output forms are called {name!r}: {places}")
    try:
        form: Form = found[0].load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"the output form {name} ({found[0].value}) cannot be loaded: {error}") from error
    return form


def _places() -> list[EntryPoint]:
    here = [
        EntryPoint(module.name.removeprefix(_PREFIX), f"{__name__}.{module.name}:show", GROUP)
        for module in pkgutil.iter_modules(__path__)
        if module.name.startswith(_PREFIX)
    ]
    return [*here, *entry_points(group=GROUP)]
