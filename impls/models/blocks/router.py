"""The router of a mixture of experts, which chooses each token's experts and their weights, and adds the
losses that balance the experts' loads.

Letters: T tokens of this rank, H hidden, E experts, k experts a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce
from spbench.impls.kernels.kept_results import keeping
from spbench.impls.kernels.projection import LIBRARIES, library_of, te_mm, te_mm_to
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.routing import capacity_of
from spbench.impls.strategies.base import Strategy

_TINY = 1e-20
#: the number of rounds of Sinkhorn's scaling: Megatron-LM stops when scales change by less than 1e-4, which
#: takes 3 or 4 rounds where logits are a new router's (of a standard deviation of 0.5, by weights of 0.02)
_SINKHORN_ROUNDS = 4


@dataclass(frozen=True)
class Routed:
    """The router's choice. Attributes:
    weights: the weights of each token's experts, and 0 for other experts [T, E].
    chosen: whether a token goes to an expert, bool [T, E].
    """

    weights: Tensor
    chosen: Tensor


class Router(nn.Module):
    """The router's module, x [T, H] -> :class:`Routed`. ``choice_bias`` [E] changes choices, not weights."""

    bias: nn.Parameter | None
    choice_bias: Tensor | None

    def __init__(self, model: Architecture, strategy: Strategy):
        super().__init__()
        self.model, self.strategy = model, strategy
        self.weight = nn.Parameter(torch.empty(model.experts, model.hidden))
        self.bias = nn.Parameter(torch.zeros(model.experts)) if model.router_linear_bias else None
        bias = torch.zeros(model.experts, dtype=torch.float32) if model.router_bias else None
        self.register_buffer("choice_bias", bias, persistent=False)
        replicas = ("dp",) if model.aux_loss == "global" else ()
        #: the axes of the ranks that count tokens together for the auxiliary loss
        self.balanced = (*replicas, *strategy.position_axes)
        # the group is made now, and not in the first step
        self.group = strategy.place.group(*self.balanced) if model.aux_loss != "none" else None

    def forward(self, x: Tensor, batch: int, forced: Tensor | None) -> Routed:
        """The routing of x [T, H], tokens of ``batch`` samples; ``forced`` [T, k] replaces chosen experts."""
        model = self.model
        dtype = _at_least_float32(x.dtype) if model.router_dtype == "float32" else x.dtype
        logits = router_logits(x, self.weight, self.bias, dtype)
        if model.z_weight:
            logits = self.strategy.losses.attach(logits, self._z_loss(logits))
        scores, to_choose = self._scores(logits)
        experts = self.choose(to_choose)
        if forced is not None:
            experts.copy_(forced)
        weights = self._weights(logits, scores, experts)
        dense = torch.zeros_like(logits).scatter(1, experts, weights)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        if model.aux_loss != "none":
            dense = self.strategy.losses.attach(dense, self._aux_loss(logits, chosen, batch))
        return Routed(dense, chosen) if model.capacity is None else self._within_capacity(dense, chosen)

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token [T, k] with the largest scores [T, E]."""
        return torch.topk(self._limited(scores), self.model.experts_per_token, dim=1).indices

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The scores [T, E] that become weights, and the scores [T, E] that choose experts."""
        model = self.model
        if model.router == "sinkhorn":
            return _plain_scores(logits, model.experts_per_token), sinkhorn(logits)
        if model.router == "sigmoid":
            scores = logits.sigmoid()
        elif model.router_scores == "all":
            scores = logits.softmax(-1, dtype=_at_least_float32(logits.dtype)).to(logits.dtype)
        else:
            scores = logits
        biased = scores if self.choice_bias is None else scores + self.choice_bias
        return scores, biased.detach()

    def _limited(self, scores: Tensor) -> Tensor:
        """The scores [T, E], with -inf for the experts of groups that a token may not use."""
        groups, met = self.model.router_groups, self.model.router_group_topk
        if not groups:
            return scores
        of_groups = scores.unflatten(1, (groups, -1))
        best = max(1, self.model.experts_per_token // met)
        totals = of_groups.topk(min(best, of_groups.shape[2]), dim=2).values.sum(2)
        meets = torch.zeros_like(totals, dtype=torch.bool).scatter(1, totals.topk(met, dim=1).indices, True)
        return of_groups.masked_fill(~meets[:, :, None], -torch.inf).flatten(1)

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """The weights of each token's experts [T, k]."""
        model = self.model
        weights = scores.gather(1, experts)
        if model.router == "softmax" and model.router_scores == "chosen":
            weights = weights.softmax(-1, dtype=_at_least_float32(logits.dtype)).to(logits.dtype)
        if model.router_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights if model.router_scale == 1 else weights * model.router_scale

    def _within_capacity(self, weights: Tensor, chosen: Tensor) -> Routed:
        """The routing in which each expert keeps its capacity's tokens of the largest weights; with
        ``capacity_padded`` an expert with too few tokens takes others, with weight 0."""
        model = self.model
        capacity = capacity_of(len(weights), model.experts_per_token, model.experts, model.capacity)
        assert capacity is not None
        # an expert's own tokens come before tokens that are not routed to the expert
        ranked = weights.detach().masked_fill(~chosen, -1.0)
        kept = ranked.topk(min(capacity, len(weights)), dim=0, sorted=False).indices
        mask = torch.zeros_like(chosen).scatter(0, kept, True)
        chosen = mask if model.capacity_padded else chosen & mask
        return Routed(weights * mask, chosen)

    # -- losses: this rank's share, whose sum over the ranks of a sample is a micro-batch's loss ------------

    def _z_loss(self, logits: Tensor) -> Tensor:
        tokens = len(logits) * self.strategy.place.size(*self.strategy.position_axes)
        return logits.logsumexp(-1).square().sum() * (self.model.z_weight / tokens)

    def _aux_loss(self, logits: Tensor, chosen: Tensor, batch: int) -> Tensor:
        """``aux_weight`` times E times the sum over experts of share of tokens times mean score, a scalar."""
        model, place = self.model, self.strategy.place
        axes = self.strategy.position_axes
        parts = batch if model.aux_loss == "sequence" else 1
        scores = _plain_aux_scores(logits, model.router)
        counts = chosen.view(parts, -1, model.experts).sum(1)
        counts = all_reduce(counts, self.group)
        own_tokens = len(logits) // parts
        tokens = own_tokens * place.size(*self.balanced)
        mean_scores = scores.view(parts, -1, model.experts).sum(1) / (own_tokens * place.size(*axes))
        shares = counts / (tokens * model.experts_per_token)
        return (shares * mean_scores).sum() * (model.aux_weight * model.experts / parts)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _plain_scores(logits: Tensor, per_token: int) -> Tensor:
    return logits.sigmoid() if per_token == 1 else logits.softmax(-1)


def _plain_aux_scores(logits: Tensor, router: str) -> Tensor:
    """Each token's scores of all experts [T, E], which sum to one."""
    if router == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + _TINY)
    return logits.softmax(-1)


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [T, E] of this rank's tokens, without gradient, with rows and columns scaled in turn for 4
    rounds, so that all experts have nearly the same sum (``sinkhorn`` of Megatron-LM's moe_utils.py)."""
    with torch.no_grad():
        cost = logits.to(_at_least_float32(logits.dtype)).exp()
        tokens, experts = cost.shape
        rows, columns = cost.new_ones(tokens), cost.new_ones(experts)
        for _ in range(_SINKHORN_ROUNDS):
            rows = 1 / (tokens * ((cost * columns).sum(1) + 1e-8))
            columns = 1 / (experts * ((cost * rows[:, None]).sum(0) + 1e-8))
        return columns * cost * rows[:, None]


class _RouterLogits(torch.autograd.Function):
    """The router's matmul, which keeps x and the weight, but not their copies in the matmul's precision.

    Megatron-Core multiplies by TransformerEngine here, also where its other layers do not
    (RouterGatingLinearFunction of core/transformer/moe/moe_utils.py, te_general_gemm).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.dtype, ctx.by_engine = bias, dtype, library_of(weight) != LIBRARIES[0]
        if ctx.by_engine:
            logits = te_mm_to(x, weight.mT, dtype)
        else:
            logits = torch.mm(x.to(dtype), weight.to(dtype).mT)
        if bias is None:
            return logits
        return logits + bias.to(dtype) if keeping() else logits.add_(bias.to(dtype))  # see keeping

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = te_mm if ctx.by_engine else torch.mm
        d_x = product(d_logits, weight.to(ctx.dtype)).to(x.dtype)
        d_weight = product(d_logits.mT, x.to(ctx.dtype)).to(weight.dtype)
        d_bias = None if ctx.bias is None else d_logits.sum(0).to(ctx.bias.dtype)
        return d_x, d_weight, d_bias, None


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The router's logits x W^T + b [T, E] in ``dtype``, from x [T, H]."""
    logits: Tensor = _RouterLogits.apply(x, weight, bias, dtype)
    return logits
