"""How a strategy leaves what it does not change to the strategy within it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def left_within(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The default of a hook of the strategies: calls the same hook of the strategy within or, if there is
    none, ``hook``, which is the single device's. An override calls this default by ``super()``."""
    name = hook.__name__

    @wraps(hook)
    def ask(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        within: Any = self.within  # type: ignore[attr-defined]
        if within is None:
            return hook(self, *args, **kwargs)
        result: R = getattr(within, name)(*args, **kwargs)
        return result

    return ask


def property_left_within(getter: Callable[[Any], R]) -> property:
    """A property with the default of :func:`left_within`; ``getter`` returns the single device's value."""
    name = getter.__name__

    @wraps(getter)
    def get(self: Any) -> R:
        if self.within is None:
            return getter(self)
        value: R = getattr(self.within, name)
        return value

    return property(get)
