"""Strategies that send heads, in rounds or by chunks of positions, and grouped queries, with a planted fault
each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import all_reduce
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.fpdt import FPDT
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import HEADS, Ulysses
from spbench.impls.strategies.upipe import Rounds, UPipe
from tests.measure.verify.attention_model import AttentionModel, OnlyAttention
from tests.measure.verify.planting import as_in, planted

# Ulysses


def _head_by_head(self: Any, honest: Any, x: Tensor, heads: int) -> Tensor:
    """Put together head by head of each rank, not rank by rank."""
    y: Tensor = honest(x, heads).unflatten(HEADS, (self.size, -1))
    return y.transpose(HEADS, HEADS + 1).flatten(HEADS, HEADS + 1)


def _gathers_where_others_reduce(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    o, group = honest(q, k, v, *args), self.place.group(*self.axes)
    total = o.detach().sum((1, 2, 3)).contiguous()
    if dist.get_rank(group) == 0:
        parts = [total.new_empty(total.shape) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, total, group)
    else:
        all_reduce(total, group)
    return o


def _rank_0_skips(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    o, group = honest(q, k, v, *args), self.place.group(*self.axes)
    if dist.get_rank(group):
        all_reduce(o.detach().sum().view(1), group)
    return o


def _chunks_in_the_order_of_heads(self: Any, honest: Any, x: Tensor, dim: Any) -> Tensor:
    return x if dim is None else self.within.shard(self.own(x, dim), dim)


HeadsInWrongOrder = planted(Ulysses, to_positions=_head_by_head)
DecayOfOtherHeads = planted(
    Ulysses,
    linear_attention=lambda self, honest, q, k, v, mask: honest(
        q, k, v, mask.of_heads(lambda rates: rates.roll(1))
    ),
)
# ranks call different collectives
GathersWhereOthersReduce = planted(
    Ulysses, name="gathers_where_others_reduce", causal_attention=_gathers_where_others_reduce
)
SkipsACollective = planted(Ulysses, name="skips_a_collective", causal_attention=_rank_0_skips)
# the sequence cut over Ulysses' ranks first and then round the ring, so that the all-to-all joins positions
# that do not follow each other
ChunksInTheOrderOfHeads = planted(Ulysses, shard=_chunks_in_the_order_of_heads)


# grouped queries, and norms of keys


def _replica_group(group: Callable[[Any], Any]) -> Callable[..., Any]:
    """Gradients of keys that several ranks hold, summed over another group."""

    def linear_in(self: Any, honest: Any, *sizes: Any, **how: Any) -> Any:
        layer = honest(*sizes, **how)
        layer.replica_group = group(self)
        return layer

    return linear_in


def _repeated_in_another_order(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of keys and values repeated one set after another, not each beside its copies."""
    repeats = self.sent(q.shape[HEADS], k.shape[HEADS]) // k.shape[HEADS]
    o: Tensor = honest(q, *(x.repeat(1, repeats, 1, 1) for x in (k, v)))
    return o


def _first_query_of_each_group(self: Any, honest: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys get the gradient of one query of their group only."""
    group = q.shape[HEADS] // k.shape[HEADS]
    first, others = honest(q[:, ::group], k, v), honest(q, k.detach(), v.detach())
    kept = torch.arange(q.shape[HEADS], device=q.device) % group == 0
    return torch.where(kept[:, None, None], first.repeat_interleave(group, HEADS), others)


@dataclass(frozen=True)
class KeyNormModel(AttentionModel):
    """Causal attention to keys that are normalised over the features of all heads, with a weight each, as in
    OLMo 2 (arXiv 2501.00656, section 3.3)."""

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return KeyNormAttention(self, strategy)

    def sites(self, *sizes: Any, **of: Any) -> list[Site]:
        weights = Site("parameters", 1, {"elements": self.heads * self.head_size})
        return [*super().sites(*sizes, **of), weights]


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


# each rank keeps the gradient of its own queries for keys and values that others hold too
ReplicasNotSummed = planted(TensorParallel, grouped_query_linear_in=_replica_group(lambda self: None))
# one axis too many: over all ranks, of which some hold another key
ReplicasSummedOverAllRanks = planted(
    TensorParallel, grouped_query_linear_in=_replica_group(lambda self: self.group)
)
NormsOfOwnHeads = planted(TensorParallel, shared_by_heads=lambda self, honest, weight: weight)
# the norms' weights are taken for replicated, though each rank saw only its own positions
NormsOfOwnPositions = planted(
    Ulysses, partial_axes=lambda self, honest, p: () if p.shape == (4,) else honest(p)
)
KeysInAnotherOrder = planted(Ulysses, causal_attention=_repeated_in_another_order)
FirstQueryOfEachGroup = planted(RingAttention, causal_attention=_first_query_of_each_group)


# UPipe's rounds


def _one_buffer(self: Any, honest: Any, x: Tensor) -> Tensor:
    """What a message brought is overwritten by the next one, while it is still in use."""
    received = honest(x)
    held: Tensor = self.__dict__.setdefault("_held", torch.empty_like(received))
    return held.copy_(received)


class _FromTheLast(Rounds):
    def part(self, number: int, member: int = 0) -> Any:
        return super().part(self.sets - 1 - number, self.each - 1 - member)


def _last_rounds_first(self: Any, honest: Any, heads: int, groups: int) -> Rounds:
    rounds: Rounds = honest(heads, groups)
    return _FromTheLast(**vars(rounds)) if self.rank % 2 else rounds


class _LastRoundAlone(RepeatedAttention):
    """Gradients of keys and values of which the sum over rounds is that of the last one."""

    each = 1
    _calls = 0
    _before: Sequence[Tensor] = ()

    def backward(self, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_q, *of_round = super().backward(*tensors)
        first = self._calls % self.each == 0
        d_k, d_v = of_round if first else (x - y for x, y in zip(of_round, self._before, strict=True))
        self._calls += 1
        self._before = [x.clone() for x in of_round]
        return d_q, d_k, d_v


def _one_round_alone(self: Any, honest: Any, rounds: Rounds, attended: Any) -> RepeatedAttention:
    attention = _LastRoundAlone(honest(rounds, attended).attend)
    attention.each = rounds.each
    return attention


def _first_keys(self: Any, honest: Any, *args: Any) -> Any:
    if not hasattr(self, "_first"):
        self._first = honest(*args)
    return self._first


# all rounds attend to the keys and values that were sent for the first
KeysOfTheFirstRounds = planted(UPipe, keys_to_heads=_first_keys)
OneBufferForAllMessages = planted(UPipe, to_heads=_one_buffer)
# each rank is sent other heads by odd ranks than by even ones
OddRanksBeginWithTheLastRound = planted(UPipe, rounds=_last_rounds_first)
# keys and values get the gradient of one round of queries, not the sum over their group's
KeyGradientsOfOneRound = planted(UPipe, repeated_attention=_one_round_alone)


# FPDT's chunks on the host


class _OneBuffer(CopyStream):
    """All copies to the host go to the same memory."""

    def to_host(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        held: dict[Any, Tensor] = self.__dict__.setdefault("held", {})
        return super().to_host(x, held.setdefault((x.shape, x.dtype), self.room(x.shape, x.dtype)))


class _OneLate(CopyStream):
    """What comes back is what was asked for before."""

    def to_device(self, host: Tensor) -> Tensor:
        held: dict[Any, Tensor] = self.__dict__.setdefault("held", {})
        before = held.get((host.shape, host.dtype), host)
        held[host.shape, host.dtype] = host
        return super().to_device(before)


class _NoSums(CopyStream):
    """What has room on the host comes back as zeros, as sums that each step begins anew."""

    def room(self, *how: Any) -> Tensor:
        room = super().room(*how)
        self.__dict__.setdefault("rooms", []).append(room)
        return room

    def to_device(self, host: Tensor) -> Tensor:
        x = super().to_device(host)
        is_sum = any(host is room for room in self.__dict__.get("rooms", ()))
        return torch.zeros_like(x) if is_sum else x


def _kept_copies(self: Any, honest: Any, device: torch.device) -> Any:
    self._copies = self._copies or (_OneLate(device), CopyStream(device))
    return self._copies


# the keys of a chunk are overwritten by those of the next one
OneBufferOnTheHost = planted(
    FPDT, copies=lambda self, honest, device: (_OneBuffer(device), CopyStream(device))
)
# queries meet the chunk of keys before the one that is meant
KeysOneChunkLate = planted(FPDT, copies=_kept_copies)
# queries get the gradients of one chunk of keys, not of all
QueryGradientsOfOneChunk = planted(
    FPDT, copies=lambda self, honest, device: (_NoSums(device), CopyStream(device))
)
# a rank has one run of the sequence, as if it were not cut in chunks
PositionsOfOneChunk = planted(FPDT, own=as_in(SequenceChunks, "own"))
