"""Ring Attention (Liu et al., arXiv 2310.01889) without any options: read this file first.

Each rank holds L/N neighbouring positions of every sequence, as queries, keys and values. Its queries need
the keys and values of all ranks, so these go round a ring: in each of N steps a rank attends to the block
that it has, and then passes the block on. No rank ever has the keys, or the scores, of a whole sequence.

A softmax needs the scores of all keys, of which a block has only some. So a query carries o, its output if
the keys so far were all, and lse, the logarithm of the sum of exp(score) over these keys. One more block
rescales both:

    new = log(exp(lse) + sum exp(score))      o = exp(lse - new) o + exp(score - new) values      lse = new

Backward, the share of a key in a query's output is exp(score - lse) with the final lse, whatever the other
blocks are. Keys and values go round once more. Behind each block travels the sum of its gradients, to which
every rank adds; after N steps the sum is back on the block's own rank.

:mod:`spbench.impls.strategies.ring_attention` is the same method in full: it sends the next block while it
attends to this one, never stores scores, and has placements, documents, windows and sinks.

Shape letters: B batch, L sequence, N ranks, Z heads, A head size; G heads of keys and values, each for Z/G
heads of queries.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.rings import ring, shift
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.layers import full_precision
from spbench.impls.strategies.sequence_chunks import GridChunks
from spbench.impls.traffic import Traffic


def scores_of(q: Tensor, keys: Tensor, diagonal: bool) -> Tensor:
    """The scores [B, G, Z/G, L/N, L/N] of this rank's queries with one block of keys, scaled by A**-0.5. On
    the ``diagonal`` the block is this rank's own under a causal mask: later keys have the score -inf."""
    scores = full_precision(q) @ full_precision(keys).mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf) if diagonal else scores


class PlainRing(torch.autograd.Function):
    """Attention round the ring: q [B, G, Z/G, L/N, A], k, v [B, G, 1, L/N, A] -> [B, G, Z/G, L/N, A]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup) -> Tensor:
        o = torch.zeros_like(full_precision(q))
        lse = o.new_full(q.shape[:-1], -torch.inf)
        for owner, (keys, values) in ring(torch.stack((k, v)), group):
            if causal and owner > group.rank():
                continue  # all its keys are later
            scores = scores_of(q, keys, causal and owner == group.rank())
            new = torch.logaddexp(lse, scores.logsumexp(-1))
            o = o * (lse - new).exp().unsqueeze(-1)
            o = o + (scores - new.unsqueeze(-1)).exp() @ full_precision(values)
            lse = new
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.group = causal, group
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        d_o, rank = full_precision(d_o), ctx.group.rank()
        d_q, sums = torch.zeros_like(o), torch.zeros_like(full_precision(torch.stack((k, v))))
        shared = (d_o * o).sum(-1, keepdim=True)
        for owner, (keys, values) in ring(torch.stack((k, v)), ctx.group):
            if owner != rank:
                sums = shift(sums, ctx.group)
            if ctx.causal and owner > rank:
                continue
            shares = (scores_of(q, keys, ctx.causal and owner == rank) - lse.unsqueeze(-1)).exp()
            d_scores = shares * (d_o @ full_precision(values).mT - shared) * q.shape[-1] ** -0.5
            d_q = d_q + d_scores @ full_precision(keys)
            d_keys, d_values = d_scores.mT @ full_precision(q), shares.mT @ d_o
            sums = sums + torch.stack([x.sum(2, keepdim=True) for x in (d_keys, d_values)])
        d_k, d_v = shift(sums, ctx.group).to(k.dtype)  # to the rank that owns the keys
        return d_q.to(q.dtype), d_k, d_v, None, None


class PlainRingAttention(GridChunks):
    """Neighbouring positions; keys and values go round a ring, one block after another."""

    name = "plain_ring_attention"
    summary = "Ring Attention in its plainest form, to read first; contiguous chunks, scores in memory"
    source = "arXiv 2310.01889, section 3"
    meets = frozenset({"causal_attention", "full_attention"})
    searched = False

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        # the class declares no documents, windows or sinks, so on several ranks none are passed
        if self.size == 1:
            return super().causal_attention(q, k, v, attended, sinks)
        return self.attend(q, k, v, True)

    def full_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, False) if self.size > 1 else super().full_attention(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Attention to the keys of all ranks: q [B, Z, L/N, A], k, v [B, G, L/N, A] -> [B, Z, L/N, A]."""
        by_group = q.unflatten(1, (k.shape[1], -1))
        o: Tensor = PlainRing.apply(by_group, k.unsqueeze(2), v.unsqueeze(2), causal, self.group)
        return o.flatten(1, 2)

    # -- what the planner asks: bytes, the busiest rank, its pairs of queries and keys --------------------

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind in self.meets and self.size > 1:
                d, phases = site.dims, ["forward", *["backward"] * (1 + site.recomputed)]
                block = 2 * d["B"] * d.get("G", d["Z"]) * (d["L"] // self.size) * d["A"]
                for phase in phases:
                    sends = site.count * (self.size - 1)
                    yield Traffic(phase, "K and V ring", "send", sends, block * element_bytes)
                sums = block * max(4, element_bytes)
                yield Traffic("backward", "dK and dV ring", "send", site.count * self.size, sums)

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        return [[size - 1, *range(size - 1)]]  # all send the same, and the last rank computes most

    def attended_pairs(self, attended: Attended, length: int) -> int:
        chunk = length // self.size
        return int(attended.pairs([(self.rank * chunk, (self.rank + 1) * chunk)]).sum())
