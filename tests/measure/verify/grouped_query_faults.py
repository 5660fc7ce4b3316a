"""Grouped-query attention and norms of keys with a planted fault each. None is registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.grouped_query import GroupedQueryLinear
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import HEADS, Ulysses
from tests.measure.verify.attention_model import AttentionModel, OnlyAttention


class ReplicasNotSummed(TensorParallel):
    """Each rank keeps the gradient of its own queries for keys and values that others hold too."""

    def grouped_query_linear_in(
        self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False
    ) -> GroupedQueryLinear:
        made = super().grouped_query_linear_in(in_features, head_size, heads, kv_heads, bias=bias)
        made.replica_group = None  # type: ignore[assignment]
        return made


class ReplicasSummedOverAllRanks(TensorParallel):
    """One axis too many: over all ranks, of which some hold another key."""

    def grouped_query_linear_in(
        self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False
    ) -> GroupedQueryLinear:
        made = super().grouped_query_linear_in(in_features, head_size, heads, kv_heads, bias=bias)
        made.replica_group = self.group  # type: ignore[assignment]
        return made


class NormsOfOwnHeads(TensorParallel):
    """The gradient of the norms' weights is that of this rank's heads."""

    def shared_by_heads(self, weight: Tensor) -> Tensor:
        return weight


class NormsOfOwnPositions(Ulysses):
    """The norms' weights are taken for replicated, though each rank saw only its own positions."""

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return () if parameter.shape == (4,) else super().partial_axes(parameter)


class KeysInAnotherOrder(Ulysses):
    """Heads of keys and values repeated one set after another, not each beside its copies."""

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = self.sent(q.shape[HEADS], k.shape[HEADS]) // k.shape[HEADS]
        k, v = (x.repeat(1, repeats, 1, 1) for x in (k, v))
        return super().causal_attention(q, k, v)


class FirstQueryOfEachGroup(RingAttention):
    """Keys get the gradient of one query of their group only."""

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[HEADS] // k.shape[HEADS]
        first = super().causal_attention(q[:, ::group], k, v)
        others = super().causal_attention(q, k.detach(), v.detach())
        kept = torch.arange(q.shape[HEADS], device=q.device) % group == 0
        return torch.where(kept[:, None, None], first.repeat_interleave(group, HEADS), others)


@dataclass(frozen=True)
class KeyNormModel(AttentionModel):
    """Causal attention to keys that are normalised over the features of all heads, with a weight each, as in
    OLMo 2 (arXiv 2501.00656, section 3.3)."""

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return KeyNormAttention(self, strategy)

    def sites(self, *sizes: Any, **of: Any) -> list[Site]:
        return [
            *super().sites(*sizes, **of),
            Site("parameters", 1, {"elements": self.heads * self.head_size}),
        ]


class KeyNormAttention(OnlyAttention):
    """The norm comes first; a strategy with ``normalised_attention`` does both."""

    def __init__(self, model: AttentionModel, strategy: Strategy):
        super().__init__(model, strategy)
        self.k_norm = nn.Parameter(torch.ones(model.heads * model.head_size))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
        if isinstance(self.strategy, KeyNormAfterAllToAll):
            return self.strategy.normalised_attention(q, k, v, self.k_norm)
        return self.strategy.causal_attention(q, normalised(k, self.k_norm), v)


def normalised(k: Tensor, weight: Tensor) -> Tensor:
    """k [B, Z, L, A], normalised over Z and A, times a weight [Z A]."""
    heads = k.shape[HEADS]
    return rms_norm(k.transpose(1, 2).flatten(2), weight).unflatten(2, (heads, -1)).transpose(1, 2)


class KeyNormAfterAllToAll(Ulysses):
    """On the wrong side of it: the norm is over the features of this rank's heads."""

    def normalised_attention(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        heads = q.shape[HEADS]
        q, k, v = (self.to_heads(x) for x in (q, k, v))
        k = normalised(k, weight.chunk(self.size)[self.rank])
        return self.to_positions(Strategy.causal_attention(self, q, k, v), heads)
