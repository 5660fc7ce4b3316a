"""Ring Attention (Liu et al., arXiv 2310.01889), with the placements of Striped Attention (arXiv 2311.09431).

Every rank holds all weights and L/N positions of every sequence. Keys and values travel round a ring, and
each rank attends with its queries to the block that is there while the next is under way. What a query has
seen is held as its output so far and the logarithm of its softmax's denominator; a further block is merged
by rescaling both (section 3). Backward, keys and values travel once more, and with them the sums of their
gradients, which come home after N steps.

Under a causal mask, where queries see no later key, the placement of positions decides how even work is:
- "contiguous", chunk r of N: rank r has r + 1 blocks to attend to, so the last rank works all the time;
- "striped", positions r, r + N, r + 2N, ...: about half of every block, for every rank (arXiv 2311.09431);
- "zigzag", chunks r and 2N-1-r of 2N: half of every block of others, exactly.

Linear attention goes round the same ring without a softmax: scores first, the left product, as the LASP
paper (arXiv 2404.02882, section 4) has it for a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import Ring
from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.kernels.linear_attention import decay_mask, decay_powers, state_dtype
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions, chunk_of
from spbench.impls.traffic import Traffic

PLACEMENTS = ("contiguous", "striped", "zigzag")
ALL = slice(None)


def meeting(placement: str, rank: int, owner: int, length: int) -> tuple[slice, slice, bool] | None:
    """Which of a rank's queries see which keys of an owner's block of as many: all that are in the two
    slices, or, where the third is True, those at the same or an earlier place. None: nobody sees any."""
    if owner == rank:
        return ALL, ALL, True
    if placement == "contiguous":
        return (ALL, ALL, False) if owner < rank else None
    if placement == "striped":
        if owner < rank:
            return ALL, ALL, True
        # place i of an owner to the right comes after place i of the rank's, so i sees the places before i
        return (slice(1, None), slice(-1), True) if length > 1 else None
    half = length // 2
    # the owner's first chunk lies before both of the rank's, or both of the owner's between the rank's two
    return (ALL, slice(half), False) if owner < rank else (slice(half, None), ALL, False)


def merge(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
    """Make of the attention (o, lse) to some keys, in place, that to a block of further keys too."""
    # exp(block_lse) / (exp(lse) + exp(block_lse)), the block's share of all weights
    share = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    o.lerp_(block_o.to(o.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)


#: gradients of an owner's keys and values, and the index of the part of both that they belong to
BlockGradients = tuple[Tensor, Tensor, Any]


def _keys_and_values(block: Sequence[Tensor]) -> Sequence[Tensor]:
    """k and v of a block that travels as one tensor [2, ...] or as two."""
    return block[0].unbind() if len(block) == 1 else block


def gradients_round(
    group: dist.ProcessGroup, block: Sequence[Tensor], of_block: Callable[..., BlockGradients | None]
) -> Sequence[Tensor]:
    """The gradients of this rank's k and v, to which every rank contributes ``of_block(owner, k, v)``, or
    nothing where that is None; to its own it contributes those of all positions.

    ``block`` is (k, v), or the two in one tensor [2, ...], which makes one message a step of two. The sums
    travel behind the blocks, in at least float32, for they are added to N times.
    """
    precise, ring = state_dtype(block[0].dtype), Ring(group)
    for owner, passing in Ring(group).round(*block):
        found = of_block(owner, *_keys_and_values(passing))
        own = owner == group.rank()
        sums = [x.new_empty(x.shape, dtype=precise) for x in block] if own else ring.finish()
        if found is not None:
            *gradients, part = found
            for total, gradient in zip(_keys_and_values(sums), gradients, strict=True):
                if own:
                    total[part].copy_(gradient)
                else:
                    total[part].add_(gradient)
        ring.start(*sums)
    return [x.to(block[0].dtype) for x in _keys_and_values(ring.finish())]


def _travelling(k: Tensor, v: Tensor) -> Tensor:
    """k and v [B, G, L/N, A] in one message [2, B, L/N, G, A], as projections make them and flash attention
    returns their gradients."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


class _RingAttention(torch.autograd.Function):
    """q [B, Z, L/N, A], k, v [B, G, L/N, A] -> [B, Z, L/N, A]; ``placement`` None: every query sees every
    key."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, placement: str | None
    ) -> Tensor:
        scale, length = q.shape[-1] ** -0.5, q.shape[2]
        for owner, (block,) in Ring(group).round(_travelling(k, v)):
            seen = (ALL, ALL, False) if placement is None else meeting(placement, group.rank(), owner, length)
            if seen is None:
                continue
            mine, theirs, causal = seen
            keys, values = block[:, :, theirs].transpose(2, 3)
            block_o, block_lse = flash_attention(q[:, :, mine], keys, values, scale, causal)
            if owner == group.rank():  # the first block, of all queries
                o, lse = block_o.to(block_lse.dtype), block_lse
            else:
                merge(o[:, :, mine], lse[:, :, mine], block_o, block_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.group, ctx.placement = group, placement
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        group, placement, scale, length = ctx.group, ctx.placement, q.shape[-1] ** -0.5, q.shape[2]
        d_q: Tensor | None = None

        def of_block(owner: int, *block: Tensor) -> BlockGradients | None:
            nonlocal d_q
            seen = (ALL, ALL, False) if placement is None else meeting(placement, group.rank(), owner, length)
            if seen is None:
                return None
            mine, theirs, causal = seen
            queries = (x[:, :, mine] for x in (d_o, q))
            keys, values = (x[:, theirs].transpose(1, 2) for x in block)
            d_queries, d_keys, d_values = flash_attention_backward(
                *queries, keys, values, o[:, :, mine], lse[:, :, mine], scale, causal
            )
            if d_q is None:  # the first block, of all queries
                d_q = d_queries.to(lse.dtype)
            else:
                d_q[:, :, mine].add_(d_queries)
            return d_keys.transpose(1, 2), d_values.transpose(1, 2), (ALL, theirs)

        d_k, d_v = gradients_round(group, [_travelling(k, v)], of_block)
        assert d_q is not None
        return d_q.to(q.dtype), d_k.transpose(1, 2), d_v.transpose(1, 2), None, None


class _RingLinearAttention(torch.autograd.Function):
    """q, k [B, Z, L/N, D], v [B, Z, L/N, A] of contiguous chunks -> [B, Z, L/N, A]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        o = v.new_zeros(v.shape, dtype=state_dtype(v.dtype))
        for owner, (keys, values) in Ring(group).round(k, v):
            if owner <= group.rank():
                o.add_(((q @ keys.mT) * block_decay(decay, group.rank() - owner, q)) @ values)
        ctx.save_for_backward(q, k, v, decay)
        ctx.group = group
        return o.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay = ctx.saved_tensors
        d_q = torch.zeros_like(q, dtype=state_dtype(q.dtype))

        def of_block(owner: int, keys: Tensor, values: Tensor) -> BlockGradients | None:
            if owner > ctx.group.rank():
                return None
            powers = block_decay(decay, ctx.group.rank() - owner, q)
            d_scores = (d_o @ values.mT) * powers
            d_q.add_(d_scores @ keys)
            return d_scores.mT @ q, ((q @ keys.mT) * powers).mT @ d_o, ...

        d_k, d_v = gradients_round(ctx.group, [k, v], of_block)
        return d_q.to(q.dtype), d_k, d_v, None, None


def block_decay(decay: Tensor | None, chunks: int, q: Tensor) -> Tensor:
    """exp(-s distance) of this rank's queries from the keys that many chunks before, as [Z or 1, L/N, L/N]
    of q's dtype; 0 where the key is the later one."""
    length = q.shape[2]
    if chunks == 0:
        return decay_mask(decay, length, q).to(q.dtype)
    places = torch.arange(length, device=q.device, dtype=state_dtype(q.dtype))
    distance = places.unsqueeze(-1) - places + chunks * length
    return decay_powers(decay, distance.flatten()).unflatten(1, distance.shape).to(q.dtype)


@dataclass(frozen=True)
class RingAttentionOptions(GridOptions):
    """What may be chosen about :class:`RingAttention`; attention along other dims of a grid than ``grid_dim``
    needs no message.

    Attributes:
        placement: of positions on ranks, one of PLACEMENTS; linear attention and grids take contiguous chunks
            only.
    """

    placement: str = "contiguous"

    def __post_init__(self) -> None:
        check_choices(self, {"placement": PLACEMENTS})


class RingAttention(GridChunks):
    """Sequence chunks whose keys and values travel round the ring, past the queries of each rank."""

    name = "ring_attention"
    summary = "sequence chunks; keys and values travel round a ring, blockwise softmax (Ring Attention)"
    source = "arXiv 2310.01889, section 3; placements: arXiv 2311.09431"
    meets = frozenset({"attention", "causal_attention", "full_attention", "linear_attention"})
    options_type = RingAttentionOptions
    options: RingAttentionOptions

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # one set, though with a causal mask their programs differ: all send the same, and none has more to
        # attend to than the last rank, which therefore stands for the set
        return [[size - 1, *range(size - 1)]]

    @property
    def length_multiple(self) -> int:
        chunks = 2 * self.size if self.options.placement == "zigzag" and self.size > 1 else 1
        return math.lcm(super().length_multiple, chunks)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        placement = self.options.placement
        for site in sites:
            if site.kind == "attention" and "mask_rows" in site.dims:
                raise Unsupported(f"{self.name} has no masks but the causal one", "use ring_self_attention")
            if site.kind in ("linear_attention", "full_attention") and placement != "contiguous":
                what = "linear attention" if site.kind == "linear_attention" else "a grid"
                raise Unsupported(f"{what} has no {placement} placement", "use placement contiguous")

    def own(self, x: Tensor, dim: int) -> Tensor:
        if self.options.placement == "contiguous":
            return super().own(x, dim)
        if self.options.placement == "striped":
            return x.unflatten(dim, (-1, self.size)).select(dim + 1, self.rank)
        places, parts = (self.rank, 2 * self.size - 1 - self.rank), 2 * self.size
        return torch.cat([chunk_of(x, dim, place, parts) for place in places], dim)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind not in self.meets or self.size == 1:
                continue
            d = site.dims
            # k has D features a head in linear attention, v always A; both may have fewer heads than q
            heads = d.get("G", d["Z"])
            block = d["B"] * heads * (d["L"] // self.size) * (d.get("D", d["A"]) + d["A"])
            once = site.count * (self.size - 1)
            for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                yield Traffic(phase, "K and V ring", "send", once, block * element_bytes)
            # N steps, so that they come home; in at least float32
            sums = block * max(4, element_bytes)
            yield Traffic("backward", "dK and dV ring", "send", site.count * self.size, sums)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        if self.size == 1:
            return super().attention(q, k, v, mask, dropout=dropout, softmax=softmax)
        if mask is not None or dropout:
            raise Unsupported(f"{self.name} has no masks and no dropout of attention", "use ulysses")
        assert self.group is not None
        return _RingAttention.apply(q, k, v, self.group, None)

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v)
        assert self.group is not None
        return _RingAttention.apply(q, k, v, self.group, self.options.placement)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().full_attention(q, k, v)
        assert self.group is not None
        return _RingAttention.apply(q, k, v, self.group, None)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, *, way: str = "chunked"
    ) -> Tensor:
        if self.size == 1:
            return super().linear_attention(q, k, v, decay, way=way)
        assert self.group is not None
        return _RingLinearAttention.apply(q, k, v, decay, self.group)
