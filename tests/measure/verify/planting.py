"""How a fault is planted: a class derived from an honest one, in which methods are replaced.

The tables of faults are attention_faults.py, head_faults.py, layer_faults.py, document_faults.py,
recurrence_faults.py and backend_faults.py. None of their classes is registered.
"""

import inspect
import linecache
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


def planted(target: type[T], /, **replaced: Any) -> type[T]:
    """A class derived from ``target``, of the name of the variable that it is assigned to.

    Args:
        replaced: by the name of a method a function of the object, the honest method and its arguments, which
            is called in its place; anything but a function becomes an attribute.
    """

    def method(attribute: str, wrong: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **how: Any) -> Any:
            return wrong(self, getattr(super(cls, self), attribute), *args, **how)

        return call

    members = {
        each: method(each, wrong) if inspect.isfunction(wrong) else wrong for each, wrong in replaced.items()
    }
    caller = sys._getframe(1)
    name, _, _ = linecache.getline(caller.f_code.co_filename, caller.f_lineno).partition(" = planted(")
    assert name.isidentifier(), name
    module = caller.f_globals["__name__"]
    cls: type[T] = type(target)(name, (target,), {"__module__": module, **members})
    return cls


def patching(module: Any, **names: Any) -> Callable[..., Any]:
    """A replacement that calls the honest method while names of a module or class are others."""

    def call(self: Any, honest: Callable[..., Any], *args: Any, **how: Any) -> Any:
        with mock.patch.multiple(module, **names):
            return honest(*args, **how)

    return call


def as_in(target: type, name: str) -> Callable[..., Any]:
    """A replacement that calls the method of another class."""
    return lambda self, honest, *args, **how: getattr(target, name)(self, *args, **how)
