"""Head and cross entropy in tiles of the vocabulary, as FusedOutputLinear of prime-rl computes them
(src/prime_rl/trainer/models/layers/lm_head.py of PrimeIntellect-ai/prime-rl, January 2026).

Each tile multiplies all tokens with some rows of the head's weight. Forward keeps only the logsumexp of each
token, and also computes the entropy, which has no gradient; backward makes each tile's logits again. The
operators are those of prime-rl, one by one, except for the label's logit, which prime-rl picks by a mask that
the host reads.

Shape letters: N tokens, H hidden, V rows of the vocabulary, C rows of a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype


def _tiles(weight: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the first row of each tile and the tile's part [C, H] of the weight."""
    for start in range(0, len(weight), rows):
        yield start, weight[start : start + rows]


def _places(labels: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """The row of each token's label in a tile [N, 1], and whether the label lies in the tile [N]."""
    return (labels - start).clamp(0, rows - 1).unsqueeze(-1), (labels >= start) & (labels < start + rows)


def _updated(m: Tensor, s: Tensor, t: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns m, s and t after a tile's logits [N, C]: each token's largest logit, sum of exponentials, and
    sum of exponentials times logits, each [N]."""
    top = torch.maximum(m, torch.amax(logits, dim=-1))
    before = torch.exp(m - top)
    exponentials = torch.exp(logits - top.unsqueeze(-1))
    s = s * before + exponentials.sum(dim=-1)
    return top, s, t * before + (exponentials * logits).sum(dim=-1)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        dtype = state_dtype(x.dtype)
        m = torch.full_like(labels, float("-inf"), dtype=dtype)
        s, t, of_label = (torch.zeros_like(labels, dtype=dtype) for _ in range(3))
        for start, part in _tiles(weight, rows):
            logits = x @ part.t()
            precise = logits.to(dtype).mul_(1.0)  # the temperature
            m, s, t = _updated(m, s, t, precise)
            place, here = _places(labels, start, len(part))
            of_label = torch.where(here, precise.gather(-1, place).squeeze(-1), of_label)
        log_sum = m + torch.log(s)
        ctx.save_for_backward(x, weight, labels, log_sum)
        ctx.rows = rows
        entropy = log_sum - t / s
        ctx.mark_non_differentiable(entropy)
        return log_sum - of_label, entropy

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, log_sum = ctx.saved_tensors
        d_x, d_weight = torch.zeros_like(x), torch.zeros_like(weight)
        g = -d_loss.to(log_sum.dtype)  # gradient of the logarithm of a label's probability
        for start, part in _tiles(weight, ctx.rows):
            logits = x @ part.t()
            precise = logits.to(log_sum.dtype).mul_(1.0)
            probabilities = torch.exp(precise - log_sum.unsqueeze(-1))
            d_logits = (-g).unsqueeze(-1) * probabilities
            place, here = _places(labels, start, len(part))
            d_logits.scatter_add_(-1, place, torch.where(here, g, 0).unsqueeze(-1))
            d_logits.mul_(1.0)
            d_x.add_(d_logits.to(x.dtype) @ part)
            d_weight[start : start + len(part)].add_(d_logits.to(weight.dtype).t() @ x)
        return d_x, d_weight if ctx.needs_input_grad[1] else None, None, None


def token_losses(x: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
    """The cross entropy [B, L] of labels [B, L], in at least float32, from x [B, L, H] and the head's weight
    [V, H], in tiles of ``rows`` rows of the vocabulary."""
    loss, _ = _TokenLosses.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), rows)
    return loss.view(labels.shape)
