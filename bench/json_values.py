"""Values in files of JSON: what numbers and texts must be, and what is wrong with others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from spbench.bench.yaml_files import dotted

#: what is measured or counted: far larger numbers are damage, and overflow where they are added
Number = Annotated[float, Field(strict=True, ge=0, le=1e24, allow_inf_nan=False)]
#: a difference, a loss: any number
Signed = Annotated[float, Field(strict=True, ge=-1e300, le=1e300, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=10**24)]
Text = Annotated[str, StringConstraints(strict=True)]

#: characters of a wrong value that a message shows
_SHOWN = 40


def problem(error: ValidationError) -> str:
    """The first field that a schema refuses, its value, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    value = first["input"]
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return ": ".join(filter(None, [dotted(first["loc"]), shown, first["msg"]]))
