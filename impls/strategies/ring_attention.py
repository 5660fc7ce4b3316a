"""Ring Attention (Liu et al., arXiv 2310.01889), with the placements of Striped Attention (arXiv 2311.09431).

Every rank holds all weights and L/N positions of every sequence. Keys and values travel round a ring, and
each rank's queries attend to one block while the next block is on its way. A query's state is its output so
far and the logarithm of its softmax's denominator; merging a further block rescales both (section 3).
Backward, keys and values travel once more, followed by the sums of their gradients, which are back on the
block's own rank after N steps.

Under a causal mask the placement of positions (:mod:`spbench.impls.strategies.placements`) decides how even
the work is.

Linear attention goes round the same ring without a softmax, and computes scores first ("left product"), as in
the LASP paper's baseline (arXiv 2404.02882, section 4).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import Ring, owners_in_turn
from spbench.impls.kernels.decay import DecayMask, decay_mask, decay_powers, state_dtype
from spbench.impls.layout import HEEDS_ALL, key_value_size, runs_again
from spbench.impls.observed_work import work_of
from spbench.impls.rings import OwnerKey
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.blockwise import Block, BlockwiseBackward, KeyBlocks, attention_to_blocks
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.halo import PassingHalo, halo_of_site, halo_traffic
from spbench.impls.strategies.meetings import ALL, Meetings
from spbench.impls.strategies.placed_chunks import DocumentPlacementOptions, PlacedChunks
from spbench.impls.traffic import Traffic

#: gradients of some of an owner's keys and values, and the index of these in the owner's block
BlockGradients = tuple[Tensor, Tensor, Any]


def _keys_and_values(block: Sequence[Tensor]) -> Sequence[Tensor]:
    """k and v of a block that travels as one tensor [2, ...] or as two."""
    return block[0].unbind() if len(block) == 1 else block


def _by_heads(block: Sequence[Tensor], rows: Any) -> Sequence[Tensor]:
    """The selected rows of a block's k and v, [B, G, rows, A] each, as views."""
    if len(block) == 1:
        return block[0][:, :, rows].transpose(2, 3).unbind()
    return [x[:, rows].transpose(1, 2) for x in block]


def _accumulate(sums: Sequence[Tensor], contribution: BlockGradients, *, first: bool) -> None:
    """Add a contribution to the sums of gradients of a block's k and v; if ``first``, set the sums to it."""
    *gradients, part = contribution
    for total, gradient in zip(_keys_and_values(sums), gradients, strict=True):
        if first:
            total[part].copy_(gradient)
        else:
            total[part].add_(gradient)


def gradients_round(
    group: dist.ProcessGroup,
    block: Sequence[Tensor],
    of_block: Callable[..., BlockGradients | None],
    everywhere: Callable[[int], Sequence[Tensor]] | None = None,
    depends_on: OwnerKey | None = None,
    work_on: Callable[[int], AbstractContextManager[None]] | None = None,
    *,
    barrier: bool = False,
) -> Sequence[Tensor]:
    """The gradients of this rank's k and v, summed over the contributions of all ranks.

    A rank contributes ``of_block(owner, k, v)`` to the block of each owner, or nothing if the result is None.
    Its contribution to its own block covers all positions.

    ``block`` is (k, v), or both in one tensor [2, ...], so that a step sends one message, not two. The sums
    travel behind the blocks, in at least float32 because N ranks add to them. ``everywhere(owner)`` returns
    an owner's block if the rank has all blocks already; then only the sums travel. ``depends_on(owner)`` is
    equal for owners whose contributions run the same operators (:meth:`Ring.round`), ``work_on(owner)`` is a
    context for computing with that block. ``barrier`` is :class:`Ring`'s.
    """
    marked = work_on or (lambda owner: nullcontext())
    precise, ring = state_dtype(block[0].dtype), Ring(group, barrier=barrier)
    if everywhere is None:
        blocks = Ring(group, barrier=barrier).round(*block, depends_on=depends_on)
    else:
        blocks = ((owner, tuple(everywhere(owner))) for owner in owners_in_turn(group, depends_on))
    for owner, passing in blocks:
        with marked(owner):
            contribution = of_block(owner, *_keys_and_values(passing))
            own = owner == group.rank()
            sums = [x.new_empty(x.shape, dtype=precise) for x in block] if own else ring.finish()
            if contribution is not None:
                _accumulate(sums, contribution, first=own)
        del contribution  # else a rank would hold it while it adds nothing to the next blocks
        ring.start(*sums)
    return [x.to(block[0].dtype) for x in _keys_and_values(ring.finish())]


def _travelling(k: Tensor, v: Tensor) -> list[Tensor]:
    """k and v [B, G, L/N, A] in one message [2, B, L/N, G, A], the layout of projections and of flash
    attention's gradients; in a message each where their heads have other sizes."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    return [torch.stack((k, v))] if k.shape == v.shape else [k.contiguous(), v.contiguous()]


@dataclass(frozen=True)
class RoundTheRing(KeyBlocks):
    """Blocks of keys and values that travel round the ring, followed by the sums of their gradients."""

    barrier: bool = False

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        # only the ring may hold the blocks: a local name would keep this rank's own block until the end
        ring = Ring(self.group, barrier=self.barrier)
        passing = ring.round(*_travelling(k, v), depends_on=self.meetings.depends_on)
        for owner, block in passing:
            if (met := self.meetings.of(owner)) is not None:
                mine, theirs, seen = met
                keys, values = _by_heads(block, theirs)
                with self.meetings.work_on(owner):
                    yield mine, keys, values, seen

    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention_gradients_round(self.group, self.meetings, backward, k, v, barrier=self.barrier)


def attention_gradients_round(
    group: dist.ProcessGroup,
    meetings: Meetings,
    backward: BlockwiseBackward,
    k: Tensor,
    v: Tensor,
    everywhere: Callable[[int], Sequence[Tensor]] | None = None,
    *,
    barrier: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's k and v [B, G, L/N, A], summed from rank to rank of the ring.
    ``everywhere(owner)`` returns k and v of an owner, [B, L/N, G, A] each, if the blocks need not travel."""

    def of_block(owner: int, *block: Tensor) -> BlockGradients | None:
        if (met := meetings.of(owner)) is None:
            return None
        mine, theirs, seen = met
        keys, values = (x[:, theirs].transpose(1, 2) for x in block)
        d_keys, d_values = backward.of_block(mine, keys, values, seen)
        return d_keys.transpose(1, 2), d_values.transpose(1, 2), (ALL, theirs)

    ways = everywhere, meetings.depends_on, meetings.work_on
    d_k, d_v = gradients_round(group, _travelling(k, v), of_block, *ways, barrier=barrier)
    return d_k.transpose(1, 2), d_v.transpose(1, 2)


def _work_on(group: dist.ProcessGroup, owner: int) -> AbstractContextManager[None]:
    """A context that marks work on a lower rank's block (:meth:`Meetings.work_on`), for linear attention."""
    return work_of(group.rank()) if owner < group.rank() else nullcontext()


class _RingLinearAttention(torch.autograd.Function):
    """Linear attention of contiguous chunks: q, k [B, Z, L/N, D], v [B, Z, L/N, A] -> [B, Z, L/N, A]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        decay, group, attended = how
        powers_of = partial(_powers_within_documents, decay, group.rank(), attended)
        o = v.new_zeros(v.shape, dtype=state_dtype(v.dtype))
        for owner, (keys, values) in Ring(group).round(k, v):
            if owner <= group.rank():
                with _work_on(group, owner):
                    o.add_(((q @ keys.mT) * powers_of(owner, q)) @ values)
        ctx.save_for_backward(q, k, v, decay)
        ctx.group, ctx.powers_of = group, powers_of
        return o.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _ = ctx.saved_tensors
        d_q = torch.zeros_like(q, dtype=state_dtype(q.dtype))

        def of_block(owner: int, keys: Tensor, values: Tensor) -> BlockGradients | None:
            if owner > ctx.group.rank():
                return None
            powers = ctx.powers_of(owner, q)
            d_scores = (d_o @ values.mT) * powers
            d_q.add_(d_scores @ keys)
            return d_scores.mT @ q, ((q @ keys.mT) * powers).mT @ d_o, ...

        d_k, d_v = gradients_round(ctx.group, [k, v], of_block, work_on=partial(_work_on, ctx.group))
        return d_q.to(q.dtype), d_k, d_v, None, None, None


def _powers_within_documents(
    decay: Tensor | None, rank: int, attended: Attended, owner: int, q: Tensor
) -> Tensor:
    """:func:`block_decay` of a rank's queries and an owner's keys; 0 where a key is in another document."""
    powers = block_decay(decay, rank - owner, q)
    if not attended.documents:
        return powers
    length, ends = q.shape[2], torch.tensor(attended.ends, device=q.device)
    places = torch.arange(length, device=q.device)
    mine, theirs = (torch.bucketize(places + r * length, ends, right=True) for r in (rank, owner))
    return powers * (mine.unsqueeze(-1) == theirs)


def block_decay(decay: Tensor | None, chunks: int, q: Tensor) -> Tensor:
    """exp(-s distance) between this rank's queries and the keys ``chunks`` chunks before, as [Z or 1, L/N,
    L/N] in q's dtype; 0 where the key is later."""
    length = q.shape[2]
    if chunks == 0:
        return decay_mask(decay, length, q).to(q.dtype)
    places = torch.arange(length, device=q.device, dtype=state_dtype(q.dtype))
    distance = places.unsqueeze(-1) - places + chunks * length
    return decay_powers(decay, distance.flatten()).unflatten(1, distance.shape).to(q.dtype)


@dataclass(frozen=True)
class RingOptions(DocumentPlacementOptions):
    """Options of :class:`RingAttention`.

    Attributes:
        repeated_keys: repeat each head of keys and values, before it is sent, for each head of queries that
            shares it, as torchtitan's layers do around torch's own ring
            (torch.distributed.tensor.experimental.context_parallel).
        barrier: after each step of the ring all ranks wait in a barrier, and the host for its device, as in
            the copy of long-context-attention that UPipe's authors ran (yunchang/ring/utils.py, RingComm).
    """

    repeated_keys: bool = False
    barrier: bool = False


class RingAttention(PlacedChunks):
    """Sequence chunks whose keys and values travel round the ring, past the queries of each rank."""

    name = "ring_attention"
    usual = True
    summary = "sequence chunks; keys and values travel round a ring, blockwise softmax (Ring Attention)"
    source = "arXiv 2310.01889, section 3; placements: arXiv 2311.09431"
    meets = frozenset({"attention", "causal_attention", "full_attention", "linear_attention"})
    heeds = HEEDS_ALL
    marks_work = True
    options_type = RingOptions
    options: RingOptions

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind not in self.meets or self.size == 1:
                continue
            if (halo := halo_of_site(site, self.size, self.options.placement)) is not None:
                yield from halo_traffic(site, halo, element_bytes)
                continue
            d = site.dims
            # k may have D features a head, v always A
            block = d["B"] * self.heads_sent(d) * (d["L"] // self.size) * key_value_size(d)
            once = site.count * (self.size - 1)
            for phase in ["forward", *(["backward"] if runs_again(site) else []), "backward"]:
                yield Traffic(phase, "K and V ring", "send", once, block * element_bytes)
            # N steps, so that the sums end on the block's own rank; in at least float32
            sums = block * max(4, element_bytes)
            yield Traffic("backward", "dK and dV ring", "send", site.count * self.size, sums)

    def heads_sent(self, dims: Mapping[str, int]) -> int:
        """The number of heads of keys and values that travel round the ring, at a site with these dims."""
        return dims["Z"] if self.options.repeated_keys else dims.get("G", dims["Z"])

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        assert self.group is not None
        if meetings.halo is not None:
            return attention_to_blocks(q, k, v, PassingHalo(self.group, meetings), sinks)
        if self.options.repeated_keys:
            shared = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        return attention_to_blocks(q, k, v, RoundTheRing(self.group, meetings, self.options.barrier), sinks)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        if self.size == 1:
            return super().linear_attention(q, k, v, mask)
        assert self.group is not None
        return _RingLinearAttention.apply(q, k, v, mask.rates, self.group, mask.attended)

    def scored_pairs(self, length: int) -> int:
        if self.size == 1:
            return super().scored_pairs(length)
        return (self.rank + 1) * (length // self.size) ** 2
