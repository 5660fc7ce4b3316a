"""Operators of this project: how a function of tensors becomes one of torch's, ``spbench::NAME``.

Not torch.library.custom_op, of which each call costs the host 3 to 4 times as much: it enters autograd, looks
for results that are arguments, and is wrapped for the compiler. So an operator here has no gradient, and is
called inside autograd functions; no result may be an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, TypeVar, cast

import torch

_LIBRARY = torch.library.Library("spbench", "FRAGMENT")
#: the devices for which an operator has a kernel of its own, by the operator's name
_DEVICES: dict[str, set[str]] = {}
F = TypeVar("F", bound=Callable[..., Any])


class Operator:
    """An operator that meters see, with a kernel for all devices and those of some."""

    def __init__(self, name: str, kernel: Callable[..., Any], schema: str):
        self.name = name
        _DEVICES[name] = set()
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        self.overload = cast(Any, getattr(torch.ops.spbench, name).default)
        update_wrapper(self, kernel)
        if schema.endswith("-> ()"):
            self.register_fake(_nothing)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.overload(*arguments, **named)

    def register_kernel(self, device: str) -> Callable[[F], F]:
        """A decorator that registers a function as the operator's kernel on one device."""

        def register(kernel: F) -> F:
            _LIBRARY.impl(self.name, kernel, device.upper())
            _DEVICES[self.name].add(device)
            return kernel

        return register

    def register_fake(self, fake: F) -> F:
        """The function takes fake tensors, and returns room for the results."""
        torch.library.register_fake(f"spbench::{self.name}", fake, lib=_LIBRARY)
        return fake


def _nothing(*arguments: Any, **named: Any) -> None:
    """The fake of an operator that writes into its arguments and returns nothing."""


def runs_plain(name: str, device: str) -> bool:
    """Whether an operator is of this project and runs its plain torch on a device, for want of a kernel."""
    return device not in _DEVICES.get(name, {device})


def operator(
    name: str, mutates_args: Iterable[str] = (), schema: str = "", fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """What makes an operator of a function, as its kernel for all devices.

    Args:
        name: with the namespace, "spbench::NAME".
        mutates_args: names of arguments that it writes into.
        schema: as torch's, without the name; "": by the function's annotations.
        fake: as of :meth:`Operator.register_fake`; None: it is registered later.
    """

    def make(kernel: Callable[..., Any]) -> Operator:
        full_schema = schema or torch.library.infer_schema(kernel, mutates_args=tuple(mutates_args))
        made = Operator(name.removeprefix("spbench::"), kernel, full_schema)
        if fake is not None:
            made.register_fake(fake)
        return made

    return make
