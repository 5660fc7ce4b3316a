"""The decay of linear attention: powers of a rate a head by the distance between positions, and Kimi Delta
Attention's decay of each feature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels.operator import differentiable, operator


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


def plain_feature_gate(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g by torch's own operators, which keep more tensors for backward."""
    x, a_log, dt_bias = (y.to(state_dtype(x.dtype)) for y in (x, a_log, dt_bias))
    return -a_log.exp().unsqueeze(-1) * F.softplus(x + dt_bias)


@operator("spbench::feature_gate", fake=lambda x, *_: x.new_empty(x.shape, dtype=state_dtype(x.dtype)))
def _gate(x: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return plain_feature_gate(x, a_log, dt_bias).contiguous()


@operator(
    "spbench::feature_gate_backward", fake=lambda d_g, *inputs: tuple(x.new_empty(x.shape) for x in inputs)
)
def _gate_backward(d_g: Tensor, x: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, A_log and dt_bias."""
    steps = x.to(d_g.dtype) + dt_bias.to(d_g.dtype)
    rate = -a_log.to(d_g.dtype).exp().unsqueeze(-1)
    d_x, d_rate = d_g * rate * steps.sigmoid(), d_g * rate * F.softplus(steps)
    return (
        d_x.to(x.dtype).contiguous(),
        d_rate.sum((0, 1, 3)).to(a_log.dtype),
        d_x.sum((0, 1)).to(dt_bias.dtype),
    )


_FEATURE_GATE = differentiable(_gate, lambda d_g, *inputs: _gate_backward(d_g.contiguous(), *inputs))


def feature_gate(x: Tensor, a_log: Tensor, dt_bias: Tensor, way: str = "fused") -> Tensor:
    """The logarithm of the decay of each feature of a key (KDA, arXiv 2510.26692, equation 10).

        g = -exp(A_log) softplus(x + dt_bias)

    As fla's kernel does (ops/kda/gate.py), the operator keeps only its inputs, and backward computes the
    softplus again.

    Args:
        x: [B, L, Z, D]; a_log: [Z]; dt_bias: [Z, D].
        way: "fused" or "plain".

    Returns:
        g [B, L, Z, D] in the states' dtype.
    """
    return (plain_feature_gate if way == "plain" else _FEATURE_GATE)(x, a_log, dt_bias)
