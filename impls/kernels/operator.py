"""Operators of this project: how a function of tensors becomes an operator of torch, ``spbench::NAME``.

This module does without torch.library.custom_op, because a call of that costs the host 3 to 4 times as much:
it enters autograd, looks for results that are arguments, and is wrapped for the compiler. So an operator here
has no gradient and is called inside autograd functions; no result of an operator may be one of its arguments.
"""

from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any, TypeVar, cast

import torch

_LIBRARY = torch.library.Library("spbench", "FRAGMENT")
#: the devices for which an operator has a kernel of its own, by the operator's name
_DEVICES: dict[str, set[str]] = {}
F = TypeVar("F", bound=Callable[..., Any])


class Operator:
    """An operator that meters see, with one kernel for all devices and, for some devices, another kernel."""

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
        """Register the function that takes fake tensors and returns empty tensors of the results' shapes."""
        torch.library.register_fake(f"spbench::{self.name}", fake, lib=_LIBRARY)
        return fake


def _nothing(*arguments: Any, **named: Any) -> None:
    """The fake of an operator that writes into its arguments and returns nothing."""


def runs_plain(name: str, device: str) -> bool:
    """Whether an operator of this project runs in plain torch on a device, because it has no kernel there."""
    return device not in _DEVICES.get(name, {device})


def operator(
    name: str, mutates_args: Iterable[str] = (), schema: str = "", fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Returns a decorator that makes an operator whose kernel for all devices is the decorated function.

    Args:
        name: the operator's name with its namespace, "spbench::NAME".
        mutates_args: names of the arguments that the operator writes into.
        schema: torch's schema of the operator without its name; "": it follows from the annotations.
        fake: the function for :meth:`Operator.register_fake`; None: the caller registers it later.
    """

    def make(kernel: Callable[..., Any]) -> Operator:
        full_schema = schema or torch.library.infer_schema(kernel, mutates_args=tuple(mutates_args))
        made = Operator(name.removeprefix("spbench::"), kernel, full_schema)
        if fake is not None:
            made.register_fake(fake)
        return made

    return make


def keeping_inputs(run: Callable[..., torch.Tensor], gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The function ``run``, whose arguments are tensors or None, with gradients; autograd keeps only the
    arguments. ``gradients`` takes the result's gradient and the arguments, and returns theirs."""

    class KeepsInputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor | None) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return run(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradients(gradient, *ctx.saved_tensors)

    return KeepsInputs.apply
