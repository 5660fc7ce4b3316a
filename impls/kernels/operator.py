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
        self.kernel = kernel
        self.overload = cast(Any, getattr(torch.ops.spbench, name).default)
        update_wrapper(self, kernel)
        if schema.endswith("-> ()"):
            self.register_fake(_nothing)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.overload(*arguments, **named)

    def register_kernel(self, device: str, takes: Callable[..., bool] | None = None) -> Callable[[F], F]:
        """A decorator that registers a function as the operator's kernel on one device, where ``takes`` of
        the arguments is true; elsewhere the kernel for all devices runs. None: for all arguments."""

        def register(kernel: F) -> F:
            def chosen(*arguments: Any) -> Any:
                return (kernel if takes is None or takes(*arguments) else self.kernel)(*arguments)

            _LIBRARY.impl(self.name, kernel if takes is None else chosen, device.upper())
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


def differentiable(
    run: Callable[..., Any],
    gradients: Callable[..., Any],
    keep: Callable[..., Iterable[Any]] | None = None,
    results: int = 1,
) -> Callable[..., Any]:
    """The function ``run`` with gradients.

    Args:
        run: a function that calls operators, and returns a tensor or several.
        gradients: a function of the results' gradients, and of what is kept. It returns the gradients of the
            arguments, or of the first ones, if the others have none; that of an argument None is ignored.
        keep: a function of the arguments, and of all that ``run`` returns. It returns what is kept for
            backward: tensors, and values of other types. None: the arguments are kept.
        results: how many of the first tensors that ``run`` returns are results; the others are only kept.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            made = _several(run(*arguments))
            kept = arguments if keep is None else tuple(keep(*arguments, *made))
            is_tensor = [isinstance(x, torch.Tensor) for x in kept]
            ctx.save_for_backward(*(x if saved else None for x, saved in zip(kept, is_tensor, strict=True)))
            ctx.others = [None if saved else x for x, saved in zip(kept, is_tensor, strict=True)]
            ctx.given = [x is not None for x in arguments]
            return made[0] if results == 1 else made[:results]

        @staticmethod
        def backward(ctx: Any, *d_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            kept = zip(ctx.saved_tensors, ctx.others, strict=True)
            made = _several(gradients(*d_results, *(other if x is None else x for x, other in kept)))
            wanted = [d if given else None for d, given in zip(made, ctx.given, strict=False)]
            return *wanted, *[None] * (len(ctx.given) - len(wanted))

    return Differentiable.apply


def _several(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
