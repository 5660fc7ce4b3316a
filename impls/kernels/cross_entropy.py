"""Cross entropy over a vocabulary that may be split over ranks (Megatron-LM, arXiv 1909.08053 section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import all_reduce


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        # full-precision logits that belong to this function: everything below works in them in place
        part = logits.shape[-1]
        first = 0 if group is None else group.rank() * part
        top = all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        logits.sub_(top.unsqueeze(-1))

        elsewhere = (labels < first) | (labels >= first + part)
        local = (labels - first).masked_fill_(elsewhere, 0).unsqueeze(-1)
        predicted = logits.gather(-1, local).squeeze(-1).masked_fill_(elsewhere, 0)
        all_reduce(predicted, group)

        exponentials = logits.exp_()
        total = all_reduce(exponentials.sum(-1), group)
        loss = total.log() - predicted
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, elsewhere, local)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, elsewhere, local = ctx.saved_tensors
        hit = (~elsewhere).unsqueeze(-1).to(softmax.dtype)
        d_logits = softmax.scatter_add_(-1, local, hit.neg_())
        return d_logits.mul_(gradient.unsqueeze(-1)), None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Per-token loss [B, L] from this rank's part of the logits [B, L, V/N] and whole labels [B, L].

    One full-precision tensor of the logits' shape is made and reused: shifted logits, exponentials,
    softmax, gradient. So backward can run once only.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    else:
        logits = logits.clone()
    return _VocabParallelCrossEntropy.apply(logits, labels, group)
