"""Attention that a strategy's own autograd function calls many times, on heads that the function does not
keep for backward, but computes or fetches again.

A single device or any strategy may attend, so backward is what autograd recorded. That graph is the same for
all calls, except for the saved tensors. So one call's graph is kept, without tensors, and runs backward with
the tensors of each call: queries, keys, values and outputs, which the caller computes again or keeps
elsewhere, and other tensors that each call returns, such as the logarithms of softmax's denominators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

#: a function of q [B, Z, L, A], k, v [B, G, L, A] and, if attention has sinks, sinks [Z] -> [B, Z, L, A]
Attend = Callable[..., Tensor]


class _Opened(torch.autograd.Function):
    """Returns views of the tensors at which a graph begins, and puts their gradients into a list. Unlike a
    leaf of a graph, this node holds no tensor."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, gradients: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether x and y are views of the same memory with the same shape and strides."""
    return (
        x.untyped_storage()._cdata == y.untyped_storage()._cdata
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
    )


class _SavedTensors:
    """The table in which the graph looks up its saved tensors. The table holds no reference to the graph,
    because Python's garbage collector sees no cycle through a graph, and would never free process groups."""

    def __init__(self) -> None:
        #: for each tensor that the graph saved, its index in (q, k, v, o, sinks, other tensors)
        self.places: list[int] = []
        self.filled: Sequence[Tensor] = ()

    def unpack(self, number: int) -> Tensor:
        return self.filled[self.places[number]]


class RepeatedAttention:
    """Attention that is called several times on tensors of the same shapes, with one graph for all calls."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self._edge: GradientEdge | None = None
        self._saved = _SavedTensors()
        self._gradients: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns (o [B, Z, L, A], the tensors that backward needs in addition to the arguments and o)."""
        saved: list[Tensor] = []

        def pack(x: Tensor) -> int:
            saved.append(x)
            return len(saved) - 1

        token = torch.empty(0, device=q.device, requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(pack, self._saved.unpack):
            o = self.attend(*_Opened.apply(token, self._gradients, q, k, v, *sinks))
        known = q, k, v, o, *sinks
        places: list[int] = []
        others: list[Tensor] = []
        for x in saved:
            place = next((i for i, y in enumerate(known) if _same(x, y)), None)
            places.append(len(known) + len(others) if place is None else place)
            if place is None:
                others.append(x.detach())
        saved.clear()  # the graph holds the list
        self._edge, self._saved.places = get_gradient_edge(o), places
        return o.detach(), others

    def backward(
        self,
        d_o: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        others: Sequence[Tensor],
        *sinks: Tensor,
    ) -> list[Tensor]:
        """The gradients of q, k, v and sinks, from d_o and the arguments and results of a :meth:`forward`."""
        assert self._edge is not None, "there was no forward"
        self._saved.filled = q, k, v, o, *sinks, *others
        torch.autograd.backward([self._edge], [d_o], retain_graph=True)
        gradients = [*self._gradients]
        self._saved.filled = ()
        self._gradients.clear()
        return gradients
