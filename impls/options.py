"""Options of models, strategies and backends: frozen dataclasses, whose fields a scenario may set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What may be chosen about a strategy or a backend; this base: nothing."""


def check_choices(options: object, choices: Mapping[str, Iterable[str]]) -> None:
    """Check fields that are words.

    Args:
        choices: what may be chosen, by field.

    Raises:
        ValueError: a field has another value.
    """
    for name, known in choices.items():
        if (value := getattr(options, name)) not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def with_options(options: T, changed: Mapping[str, Any]) -> T:
    """A frozen dataclass with those of some options changed that it has."""
    known = {f.name for f in fields(options)}  # type: ignore[arg-type]
    return replace(options, **{k: v for k, v in changed.items() if k in known})  # type: ignore[type-var]


def set_options(defaults: T, given: Mapping[str, Any] | None, owner: str) -> T:
    """A frozen dataclass with some of its fields changed.

    Args:
        owner: whose options they are, for messages.

    Raises:
        KeyError: there is no such field; with those that there are.
        ValueError: the dataclass refuses a value.
    """
    allowed = [f.name for f in fields(defaults)]  # type: ignore[arg-type]
    for name in given or {}:
        if name not in allowed:
            raise KeyError(f"{owner} has no option {name!r}; it has: {', '.join(allowed) or 'none'}")
    return replace(defaults, **(given or {}))  # type: ignore[type-var]
