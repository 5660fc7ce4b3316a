"""Attention sinks: a learned logit of each head that joins the softmax's denominator, and has no value
(gpt-oss, arXiv 2508.10925; "softmax off by one" where it is 0).

    o_i = sum over j of exp(s_ij) v_j / (exp(sink) + sum over j of exp(s_ij))

A sink is applied to the results of attention without sinks, o and lse (the logarithm of the denominator), as
torchtitan does behind flex attention. A query's keys may come in blocks; then the sink joins once, after the
last block is merged. Backward through the keys uses the changed o and lse, and is otherwise the same as
without a sink. Kernels with sinks (TransformerEngine's softmax_offset) spare the pass over o. Shapes: o
[B, Z, M, A], lse [B, Z, M], sinks [Z].
"""

import torch
from torch import Tensor

from spbench.impls.kernels.flash_attention import operator
from spbench.impls.kernels.kept_results import kept
from spbench.impls.kernels.operator import differentiable
from spbench.impls.kernels.ranged_attention import (
    Seen,
    attention_to_block,
    attention_to_block_backward,
)


def join_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Change o of attention without sinks, in place, to the output with sinks; returns lse [B, Z, M] with
    sinks."""
    joined = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    o.mul_((lse - joined).exp_().unsqueeze(-1))
    return joined


def _sinks_gradient(d_o: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    # the sink's probability p has no value, so its logit's gradient is p (0 - sum of d_o o)
    p = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp_()
    products = (d_o.to(lse.dtype) * o).sum(-1)
    return (p * products).sum((0, 2)).neg_().to(sinks.dtype)


def _fake_sinks_gradient(d_o: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.empty_like(sinks)


#: (d_o, o, lse, sinks) -> the gradient of the sinks [Z]; o and lse are results of attention with sinks
sinks_gradient = operator(
    "attention_sinks_gradient(Tensor d_o, Tensor o, Tensor lse, Tensor sinks) -> Tensor",
    _sinks_gradient,
    _fake_sinks_gradient,
)


def _attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    o, lse = attention_to_block(q, k, v, q.shape[-1] ** -0.5, seen)
    return o, join_sinks(o, lse, sinks)


def _gradients(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen, o: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    d_sinks = sinks_gradient(d_o, o, lse, sinks)
    return *attention_to_block_backward(d_o, q, k, v, o, lse, q.shape[-1] ** -0.5, seen), d_sinks


_ATTENTION_WITH_SINKS = differentiable(
    lambda *arguments: kept(lambda: _attended(*arguments)),
    _gradients,
    lambda *arguments_and_results: arguments_and_results,
)


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Seen) -> Tensor:
    """Returns o [B, Z, M, A] of softmax attention with one sink a head, scores scaled by A**-0.5, where
    queries see the keys that ``seen`` says; keeps q, k, v, o and lse."""
    result: Tensor = _ATTENTION_WITH_SINKS(q, k, v, sinks, seen)
    return result
