"""Strategies around each other with a planted fault each, as public code has had them. None is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.collectives import joined, start_all_gather
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.projection import project
from spbench.impls.layout import SequenceDim, shard_of
from spbench.impls.models.bert import Bert, BertModel
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import chunk_of
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses


class SumLacksTheSequenceAxis(TensorParallel):
    """Data parallelism over a group without the sequence axis, whose all-reduce is silently none
    (VeOmni, before pull request 1115)."""

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return tuple(axis for axis in super().partial_axes(parameter) if axis != "sp")


class SumHasTheTensorAxisToo(TensorParallel):
    """Gradients of what is not split summed over one axis too many, so that they come out tp times as large
    (as DeepSpeed issue 6841 reports of the sequence degree)."""

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        found = super().partial_axes(parameter)
        return found if shard_of(parameter) else (*self.axes, *found)


class _SliceForSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strategy: MegatronSP) -> Tensor:
        ctx.strategy = strategy
        parts, arrival = start_all_gather(x, strategy.group)
        arrival.wait()
        return joined(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return chunk_of(gradient, 1, ctx.strategy.rank, ctx.strategy.size), None


class GatherWithoutTheSum(MegatronSP):
    """An all-gather whose backward takes this rank's slice and does not sum (VeOmni pull request 1120)."""

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return project(_SliceForSum.apply(x, self), weight, bias)


class PositionsOfTheLocalChunk(RingAttention):
    """RoPE counts the positions of every chunk from zero (360-LLaMA-Factory issue 72)."""

    def block_part(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, 0, x.shape[dim] // self.size)


class ChunksInTheOrderOfHeads(Ulysses):
    """The sequence cut over Ulysses' ranks first and then round the ring, so that the all-to-all joins
    positions that do not follow each other."""

    def shard(self, x: Tensor, dim: SequenceDim) -> Tensor:
        assert self.within is not None
        return x if dim is None else self.within.shard(self.own(x, dim), dim)  # type: ignore[arg-type]


class NestedHeadsWithOneDecay(TensorParallel):
    """Every tensor parallel rank takes the decay of the first heads."""

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        first = mask.of_heads(lambda rates: rates.chunk(self.size)[0].repeat(self.size))
        return super().linear_attention(q, k, v, first)


class _AveragedByRank(Bert):
    def _losses(self, x: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        losses, weights = super()._losses(x, inputs), inputs["loss_weights"]
        mean = losses["mlm_loss"] / (weights.sum() * self.strategy.sequence_parts)
        return {**losses, "mlm_loss": mean, "loss": mean + losses["order_loss"]}


@dataclass(frozen=True)
class LossAveragedByRank(BertModel):
    """Each rank takes the mean over its own masked tokens, and the means are averaged, though ranks have
    unequally many of them (VeOmni pull request 338)."""

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return _AveragedByRank(self, strategy, seq_len, stage)
