"""The decay of linear attention: powers of a rate a head by the distance between positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended


@dataclass(frozen=True)
class DecayMask:
    """M of linear attention, o = ((q k^T) * M) v: exp(-s (i - j)) where j <= i and positions i and j lie in
    one document, else 0 (RetNet, arXiv 2307.08621, equation 5, where the decay is gamma = exp(-s)).

    Attributes:
        rates: the rate s >= 0 of each head [Z], per position; None: 0.
        attended: the documents of the sequence.
        way: how a single device computes o; :meth:`Strategy.linear_attention` lists the ways.
    """

    rates: Tensor | None = None
    attended: Attended = CAUSAL
    way: str = "chunked"

    def of_heads(self, chosen: Callable[[Tensor], Tensor]) -> DecayMask:
        """The mask of some of the heads: ``chosen`` returns their rates from the rates of all heads."""
        return self if self.rates is None else replace(self, rates=chosen(self.rates))


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and sums for inputs of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def decay_powers(decay: Tensor | None, distance: Tensor) -> Tensor:
    """exp(-s distance) [Z, n] (or [1, n]) for distances [n] in positions, which have the states' dtype."""
    if decay is None:
        return torch.ones_like(distance).unsqueeze(0)
    return torch.exp(-decay.to(distance.dtype).unsqueeze(-1) * distance)


def decay_mask(decay: Tensor | None, length: int, like: Tensor) -> Tensor:
    """exp(-s (i - j)) where j <= i, else 0: [Z, length, length] (or [1, ...]) of the states' dtype."""
    position = positions(length, like)
    distance = position.unsqueeze(-1) - position
    rate = position.new_zeros(1) if decay is None else decay.to(distance.dtype)
    # masked before exp, because the power of a future position would overflow
    return torch.where(distance < 0, -torch.inf, -rate.view(-1, 1, 1) * distance).exp_()


def positions(length: int, like: Tensor) -> Tensor:
    """The numbers 0 to length - 1 as a tensor [length] of the states' dtype, on the device of ``like``."""
    return torch.arange(length, device=like.device, dtype=state_dtype(like.dtype))
