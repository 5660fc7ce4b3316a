"""What goes into the attention of a model and comes out of it, in the order of execution, with the gradients.

Outputs and gradients of weights say that a strategy is wrong; these say where its step goes wrong first. They
are watched only to explain a verdict, in a run of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from spbench.impls.strategies.base import Strategy

#: what strategies override of [B, Z, L or a part, A]: queries, keys and values in, heads out
SITES = ("attention", "causal_attention", "linear_attention")
#: the sequence dim of what these take and return
SITE_DIM = 2


@dataclass
class Sites:
    """Attributes:
    values: by name, "k of attention 0": what went into and came out of the sites in forward.
    gradients: by the same names, once backward has reached them.
    order: when forward came to each of these, and to each module by its name.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, x: Any, at: int) -> None:
        """Keep a tensor, and its gradient when it comes."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        self.values[name], self.order[name] = x.detach().clone(), at
        if x.requires_grad:

            def keep(gradient: Tensor) -> None:
                self.gradients[name] = gradient.detach().clone()

            x.register_hook(keep)


@contextmanager
def watched(strategy: Strategy, module: nn.Module) -> Iterator[Sites]:
    """The sites that the module's forward comes to inside; not those of a part that backward runs again."""
    sites, clock, calls = Sites(), itertools.count(), itertools.count()
    inside = False

    def watch(method: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # one that another hands over to
                return method(*args, **kwargs)
            inside, number = True, next(calls)
            try:
                for letter, x in zip("qkv", args, strict=False):
                    sites.note(f"{letter} of attention {number}", x, next(clock))
                o = method(*args, **kwargs)
                sites.note(f"o of attention {number}", o, next(clock))
                return o
            finally:
                inside = False

        return attend

    def begun(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            sites.order.setdefault(name, next(clock))

        return note

    with ExitStack() as stack:
        for name in SITES:
            setattr(strategy, name, watch(getattr(strategy, name)))
            stack.callback(delattr, strategy, name)
        for name, each in module.named_modules():
            stack.callback(each.register_forward_pre_hook(begun(name)).remove)
        yield sites
