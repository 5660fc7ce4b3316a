"""Ulysses, Megatron-SP, Ring Attention and gathered keys with a planted fault each. None is registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.kernels.decay import DecayMask
from spbench.impls.strategies import all_gather_kv, blockwise, ring_attention
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.blockwise import BlockwiseBackward
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.megatron_sp import MegatronSP
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import HEADS, Ulysses
from tests.measure.verify.attention_model import rotated


class HeadsInWrongOrder(Ulysses):
    """What comes back is put together head by head of each rank, not rank by rank."""

    def to_positions(self, x: Tensor, heads: int) -> Tensor:
        y = super().to_positions(x, heads)
        return y.unflatten(HEADS, (self.size, -1)).transpose(HEADS, HEADS + 1).flatten(HEADS, HEADS + 1)


class DecayOfOtherHeads(Ulysses):
    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        return super().linear_attention(q, k, v, mask.of_heads(lambda rates: rates.roll(1)))


class LocalSliceForReduceScatter(MegatronSP):
    def leave(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, 1)[self.rank]


class NormsNotReduced(MegatronSP):
    """Taken for replicated, as they are in tensor parallelism; each rank saw only its own positions."""

    def partial_axes(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return super().partial_axes(parameter) if parameter.ndim > 1 else ()


def _one_late(
    group: dist.ProcessGroup, block: Sequence[Tensor], of_block: Callable[..., Any], *how: Any
) -> Sequence[Tensor]:
    """Every owner with the block of the owner before it; the first is right."""
    before: list[tuple[Tensor, Tensor]] = []

    def late(owner: int, keys: Tensor, values: Tensor) -> Any:
        before.append((keys.clone(), values.clone()))
        return of_block(owner, *before[max(0, len(before) - 2)])

    return _honest_round(group, block, late, *how)


_honest_round = ring_attention.gradients_round
_honest_decay = ring_attention.block_decay
_honest_forward = blockwise.attention_to_block
_honest_backward = blockwise.attention_to_block_backward
_honest_gather = all_gather_kv.gathered


class _StaleRing(ring_attention.RoundTheRing):
    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(ring_attention, "gradients_round", _one_late):
            return super().gradients(backward, k, v)


class StaleBlockInRingBackward(RingAttention):
    """As a popular ring attention once had it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return blockwise.attention_to_blocks(q, k, v, _StaleRing(self.group, meetings))


def _of_block_alone(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *how: Any) -> Any:
    return _honest_backward(d_o, q, k, v, *_honest_forward(q, k, v, *how), *how)


class _RingOfBlocksAlone(ring_attention.RoundTheRing):
    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(blockwise, "attention_to_block_backward", _of_block_alone):
            return super().gradients(backward, k, v)


class BackwardOfBlocksAlone(RingAttention):
    """Each block's gradients with the output and the log-sum-exp of that block, not of all keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return blockwise.attention_to_blocks(q, k, v, _RingOfBlocksAlone(self.group, meetings))


def _rounded(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = _honest_forward(*arguments)
    return o, lse.bfloat16().to(lse.dtype)


class LogSumExpInHalfPrecision(RingAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        with mock.patch.object(blockwise, "attention_to_block", _rounded):
            return super().attend(q, k, v, meetings)


def _added(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
    o.add_(block_o)
    lse.copy_(torch.logaddexp(lse, block_lse))


class MergeWithoutRescaling(RingAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        with mock.patch.object(blockwise, "merge", _added):
            return super().attend(q, k, v, meetings)


def _one_chunk_further(decay: Tensor | None, chunks: int, q: Tensor) -> Tensor:
    return _honest_decay(decay, chunks + 1 if chunks else 0, q)


class DecayOffByOneChunk(RingAttention):
    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        with mock.patch.object(ring_attention, "block_decay", _one_chunk_further):
            return super().linear_attention(q, k, v, mask)


class StripesInAnotherOrder(RingAttention):
    """Striped positions under the causal blocks of contiguous ones."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return super().attend(q, k, v, replace(meetings, placement="contiguous"))


class ZigzagUnderContiguousBlocks(AllGatherKV):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return super().attend(q, k, v, replace(meetings, placement="contiguous"))


def _own_part(gradients: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    d_k, d_v = gradients[group.rank()].permute(2, 1, 3, 0, 4).unbind()
    return d_k, d_v


class _UnsummedGradients(all_gather_kv.GatheredKeys):
    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with mock.patch.object(all_gather_kv, "summed", _own_part):
            return super().gradients(backward, k, v)


class LocalSliceOfKeyGradients(AllGatherKV):
    """A gather whose backward takes the rank's part of its own gradient, without the sum over the ranks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return blockwise.attention_to_blocks(
            q, k, v, _UnsummedGradients(self.group, meetings, "reduce_scatter")
        )


class GatheredKeysRotatedInOrder(AllGatherKV):
    """Rotary embedding of gathered keys by 0, 1, 2, ..., as if they came in the order of the sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        length = self.size * k.shape[2]
        ranks = [self.planned(self.size, r, {"placement": meetings.placement}) for r in range(self.size)]
        order = torch.arange(length)
        off = order - torch.cat([strategy.own(order, 0) for strategy in ranks])

        def gathered(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
            parts = _honest_gather(k, v, group)
            keys = parts[..., 0, :, :]  # [N, L/N, B, Z, A]
            turned = rotated(keys.flatten(0, 1).movedim(0, -2), off)
            keys.copy_(turned.movedim(-2, 0).view_as(keys))
            return parts

        with mock.patch.object(all_gather_kv, "gathered", gathered):
            return super().attend(q, k, v, meetings)
