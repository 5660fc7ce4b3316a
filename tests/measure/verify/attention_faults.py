"""Ring Self-Attention, Ring Attention and gathered keys with a planted fault each, as real code has had."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import all_reduce, reduce_from_group, ring
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.strategies import all_gather_kv, blockwise, ring_attention
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.halo import KeyValueRows
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ring_self_attention import RingOutput, RingScores, RingSelfAttention
from tests.measure.verify.attention_model import rotated
from tests.measure.verify.planting import patching, planted

# Ring Self-Attention: gradients


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def _gradients_times(factor: Callable[[Strategy], float]) -> Callable[..., Tensor]:
    """Attention with the gradients of q, k and v multiplied."""

    def attention(
        self: Strategy, honest: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any
    ) -> Any:
        return honest(*(_ScaleGradient.apply(x, factor(self)) for x in (q, k, v)), *args, **how)

    return attention


def _on_last_rank(factor: float) -> Callable[[Strategy], float]:
    return lambda self: factor if self.rank == self.size - 1 else 1.0


def _own_scores(scores: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Attention with another Q K^T."""

    def attention(self: Strategy, _: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        s = scores.apply(q, k, self.group).unflatten(0, heads) * q.shape[-1] ** -0.5
        s = s if mask is None else s.masked_fill(mask, -10000)
        o: Tensor = RingOutput.apply(s.softmax(-1).flatten(0, 1), v, self.group)
        return o.unflatten(0, heads)

    return attention


def _columns(x: Tensor, owner: int, chunk: int) -> Tensor:
    """The columns of x [BZ, L/N, L] that belong to the keys of ``owner``."""
    return x[:, :, owner * chunk : (owner + 1) * chunk]


def _one_late(chunks: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Every owner with the chunk of the owner before it; the first is right."""
    previous = None
    for owner, chunk in chunks:
        yield owner, chunk if previous is None else previous
        previous = chunk.clone()


class _StaleScores(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        _, d_k, _ = RingScores.backward(ctx, d_scores)
        d_q = torch.zeros_like(q)
        for owner, keys in _one_late(ring(k, ctx.group)):
            d_q.baddbmm_(_columns(d_scores, owner, k.shape[1]), keys)
        return d_q, d_k, None


class _WrongRowsScores(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, _ = ctx.saved_tensors
        d_q, _, _ = RingScores.backward(ctx, d_scores)
        d_keys = all_reduce(torch.bmm(d_scores.transpose(1, 2), q), ctx.group)
        size, rank = ctx.group.size(), ctx.group.rank()
        return d_q, d_keys.chunk(size, 1)[(rank + 1) % size].contiguous(), None


class _LocalKeyGradient(RingScores):
    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        d_q, _, _ = RingScores.backward(ctx, d_scores)
        own = _columns(d_scores, ctx.group.rank(), k.shape[1])
        return d_q, torch.bmm(own.transpose(1, 2), q), None


def _raise_on_last_rank(self: Strategy, honest: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
    if self.rank == self.size - 1:
        raise ArithmeticError("planted")
    return honest(*args, **how)


RSA = RingSelfAttention
ZeroGradients = planted(RSA, attention=_gradients_times(lambda self: 0.0))
# as the public code of Ring Self-Attention has it
OneNthGradients = planted(RSA, attention=_gradients_times(lambda self: 1 / self.size))
SlightlyWrongOnLastRank = planted(RSA, attention=_gradients_times(_on_last_rank(1 + 1e-6)))
NanOnLastRank = planted(RSA, attention=_gradients_times(_on_last_rank(math.nan)))
# as a popular ring attention once had it
StaleBlockInBackward = planted(RSA, attention=_own_scores(_StaleScores))
RowsOfAnotherRank = planted(RSA, attention=_own_scores(_WrongRowsScores))
KeyGradientsNotReduced = planted(RSA, attention=_own_scores(_LocalKeyGradient))
MaskForgotten = planted(
    RSA, attention=lambda self, honest, q, k, v, mask, **how: honest(q, k, v, None, **how)
)
BiasesNotSynchronized = planted(RSA, partial_axes=lambda self, honest, p: honest(p) if p.ndim > 1 else ())
# every rank takes its own first position for the sequence's
OrderLossOnEveryRank = planted(RSA, first_token=lambda self, honest, x: (x[:, 0], 1.0))
SameChunkOnEveryRank = planted(
    RSA, shard=lambda self, honest, x, dim: x if dim is None else x.chunk(self.size, dim)[0]
)
# the whole projection is used differently by each rank, so its gradient needs a sum too
LinformerGradientNotReduced = planted(
    RSA, project_sequence=lambda self, honest, x, weight: reduce_from_group(weight @ x, self.group)
)
RaisesOnLastRank = planted(RSA, attention=_raise_on_last_rank)


# Ring Attention and gathered keys: blocks of keys that arrive

_honest_round = ring_attention.gradients_round
_honest_decay = ring_attention.block_decay
_honest_forward = blockwise.attention_to_block
_honest_backward = blockwise.attention_to_block_backward
_honest_gather = all_gather_kv.gathered


def _late_round(
    group: dist.ProcessGroup, block: Sequence[Tensor], of_block: Callable[..., Any], *how: Any, **sent: Any
) -> Sequence[Tensor]:
    """Every owner with the block of the owner before it; the first is right."""
    before: list[tuple[Tensor, Tensor]] = []

    def late(owner: int, keys: Tensor, values: Tensor) -> Any:
        before.append((keys.clone(), values.clone()))
        return of_block(owner, *before[max(0, len(before) - 2)])

    return _honest_round(group, block, late, *how, **sent)


def _of_block_alone(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *how: Any) -> Any:
    return _honest_backward(d_o, q, k, v, *_honest_forward(q, k, v, *how), *how)


def _rounded(*arguments: Any) -> tuple[Tensor, Tensor]:
    o, lse = _honest_forward(*arguments)
    return o, lse.bfloat16().to(lse.dtype)


def _added(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
    o.add_(block_o)
    lse.copy_(torch.logaddexp(lse, block_lse))


def _one_chunk_further(decay: Tensor | None, chunks: int, q: Tensor) -> Tensor:
    return _honest_decay(decay, chunks + 1 if chunks else 0, q)


def _own_part(gradients: Tensor, layout: KeyValueRows, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    d_k, d_v = (x.permute(1, 2, 0, 3) for x in layout.separate(gradients[group.rank()]))
    return d_k, d_v


def _scaled_by_values(q: Tensor, k: Tensor, v: Tensor, scale: float, *how: Any) -> Any:
    return _honest_forward(q, k, v, v.shape[-1] ** -0.5, *how)


def _blocks(kind: type[Any], *further: Any) -> Callable[..., Tensor]:
    """Attention to the blocks that another class brings."""

    def attend(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        return blockwise.attention_to_blocks(q, k, v, kind(self.group, meetings, *further))

    return attend


def _other_meetings(change: Callable[[Any, Meetings], Meetings]) -> Callable[..., Tensor]:
    """Attention among other keys than are meant."""

    def attend(
        self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, *sinks: Any
    ) -> Any:
        return honest(q, k, v, change(self, meetings), *sinks)

    return attend


def _shifted_in_chunk(self: Any, honest: Any, x: Tensor, dim: int) -> Tensor:
    part: Tensor = honest(x, dim)
    if x.ndim == 3 and not x.is_floating_point():  # the last position has the chunk's first token behind it
        part = torch.cat((part[:, :-1], part[:, :1]), 1)
    return part


def _rotated_in_order(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
    """Rotary embedding of gathered keys by 0, 1, 2, ..., as if they came in the order of the sequence."""
    length = self.size * k.shape[2]
    ranks = [self.planned(self.size, r, {"placement": meetings.placement}) for r in range(self.size)]
    order = torch.arange(length)
    off = order - torch.cat([strategy.own(order, 0) for strategy in ranks])

    def gathered(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = _honest_gather(k, v, group)
        keys, _ = KeyValueRows.like(k, v).separate(parts)  # [N, L/N, B, Z, A]
        turned = rotated(keys.flatten(0, 1).movedim(0, -2), off)
        keys.copy_(turned.movedim(-2, 0).view_as(keys))
        return parts

    return patching(all_gather_kv, gathered=gathered)(self, honest, q, k, v, meetings)


_StaleRing = planted(
    ring_attention.RoundTheRing, gradients=patching(ring_attention, gradients_round=_late_round)
)
_RingOfBlocksAlone = planted(
    ring_attention.RoundTheRing, gradients=patching(blockwise, attention_to_block_backward=_of_block_alone)
)
_UnsummedGradients = planted(all_gather_kv.GatheredKeys, gradients=patching(all_gather_kv, summed=_own_part))
# as a popular ring attention once had it
StaleBlockInRingBackward = planted(RingAttention, attend=_blocks(_StaleRing))
# each block's gradients with the output and the log-sum-exp of that block, not of all keys
BackwardOfBlocksAlone = planted(RingAttention, attend=_blocks(_RingOfBlocksAlone))
LogSumExpInHalfPrecision = planted(RingAttention, attend=patching(blockwise, attention_to_block=_rounded))
MergeWithoutRescaling = planted(RingAttention, attend=patching(blockwise, merge=_added))
# a ring path that drops the scale of latent attention (prime-rl issue 2681)
ScaleOfValues = planted(
    RingAttention, heeds=HEEDS_ALL, attend=patching(blockwise, attention_to_block=_scaled_by_values)
)
DecayOffByOneChunk = planted(
    RingAttention, linear_attention=patching(ring_attention, block_decay=_one_chunk_further)
)
_contiguous = _other_meetings(lambda self, meetings: replace(meetings, placement="contiguous"))
# striped and zigzag positions under the causal blocks of contiguous ones
StripesInAnotherOrder = planted(RingAttention, attend=_contiguous)
ZigzagUnderContiguousBlocks = planted(AllGatherKV, attend=_contiguous)
# a gather whose backward takes the rank's part of its own gradient, without the sum over the ranks
LocalSliceOfKeyGradients = planted(AllGatherKV, attend=_blocks(_UnsummedGradients, "reduce_scatter"))
GatheredKeysRotatedInOrder = planted(AllGatherKV, attend=_rotated_in_order)
# tokens to predict further ones from are shifted within each chunk (Megatron-LM issue 7498)
NextTokensOfTheLocalChunk = planted(RingAttention, shard=_shifted_in_chunk)
# RoPE counts the positions of every chunk from zero (360-LLaMA-Factory issue 72)
PositionsOfTheLocalChunk = planted(
    RingAttention, block_part=lambda self, honest, x, dim: x.narrow(dim, 0, x.shape[dim] // self.size)
)
