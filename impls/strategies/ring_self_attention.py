"""Ring Self-Attention (RSA; Li et al., "Sequence Parallelism", arXiv 2105.13120, section 3.2).

Every rank holds all weights and a chunk of L/N positions of every sequence. Only attention needs other
chunks. Forward, the key chunks travel round the ring and each rank fills in its L/N rows of the score matrix;
after the softmax, the value chunks travel and each rank sums its outputs. Backward (section 3.2.2), values
and keys travel once more. Two all-reduces sum the gradients of keys and values, to which every rank
contributes for all L positions.

Gradients of parameters are summed over the ranks, not averaged: the loss is one sum over all positions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import all_reduce, ring, sum_over_group
from spbench.impls.kernels.softmax import masked_softmax
from spbench.impls.options import Options
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.sequence_chunks import SequenceChunks, chunk_of
from spbench.impls.traffic import Traffic


class RingScores(torch.autograd.Function):
    """Q K^T of this rank's queries with the keys of all ranks: q, k [BZ, L/N, A] -> [BZ, L/N, L]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.group = group
        heads, chunk, _ = q.shape
        scores = q.new_empty(heads, chunk, chunk * _size(group))
        for owner, keys in ring(k, group):
            torch.bmm(q, keys.transpose(1, 2), out=chunk_of(scores, 2, owner, _size(group)))
        return scores

    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        d_q = torch.zeros_like(q)
        for owner, keys in ring(k, ctx.group):
            d_q.baddbmm_(chunk_of(d_scores, 2, owner, _size(ctx.group)), keys)
        d_keys = torch.bmm(d_scores.transpose(1, 2), q)  # this rank's part of the sum, for all L keys
        return d_q, _own_rows(all_reduce(d_keys, ctx.group), ctx.group), None


class RingOutput(torch.autograd.Function):
    """P V, this rank's rows times all ranks' values: p [BZ, L/N, L], v [BZ, L/N, A] -> [BZ, L/N, A]."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(p, v)
        ctx.group = group
        output = torch.zeros_like(v)
        for owner, values in ring(v, group):
            output.baddbmm_(chunk_of(p, 2, owner, _size(group)), values)
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, None]:
        p, v = ctx.saved_tensors
        d_output = d_output.contiguous()
        d_p = torch.empty_like(p)
        for owner, values in ring(v, ctx.group):
            torch.bmm(d_output, values.transpose(1, 2), out=chunk_of(d_p, 2, owner, _size(ctx.group)))
        d_values = torch.bmm(p.transpose(1, 2), d_output)  # this rank's part of the sum, for all L values
        return d_p, _own_rows(all_reduce(d_values, ctx.group), ctx.group), None


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _own_rows(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's L/N rows of x [BZ, L, A], copied so that x can be freed."""
    if _size(group) == 1:
        return x
    assert group is not None
    return chunk_of(x, 1, group.rank(), group.size()).contiguous()


@dataclass(frozen=True)
class RingSelfAttentionOptions(Options):
    """Options of :class:`RingSelfAttention`.

    Attributes:
        pad_vocabulary_by_ranks: pad the vocabulary to a multiple that grows with the ranks, as if it were
            split over ranks; the paper's code does so, because it derives from tensor parallelism.
    """

    pad_vocabulary_by_ranks: bool = False


class RingSelfAttention(SequenceChunks):
    """Sequence chunks whose keys, then values, travel round a ring; a rank stores its queries' scores."""

    name = "ring_self_attention"
    summary = "sequence chunks; keys, then values, travel round a ring (RSA)"
    source = "arXiv 2105.13120, section 3.2"
    meets = frozenset({"attention", "project_sequence"})
    options_type = RingSelfAttentionOptions
    options: RingSelfAttentionOptions

    @property
    def vocabulary_parts(self) -> int:
        return super().vocabulary_parts * (self.size if self.options.pad_vocabulary_by_ranks else 1)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        size, sites = self.size, list(sites)
        for site in sites:
            d, count = site.dims, site.count
            forwards = ["forward", "backward"] if site.recomputed else ["forward"]
            if site.kind == "attention":
                # 2(N-1) B Z (L/N) A forward, 6(N-1) B Z (L/N) A backward (section 3.2.2)
                whole = d["B"] * d["Z"] * d["L"] * d["A"] * element_bytes
                for phase in forwards:
                    yield Traffic(phase, "K and V rings", "send", count * 2 * (size - 1), whole // size)
                yield Traffic("backward", "V and K rings", "send", count * 2 * (size - 1), whole // size)
                yield Traffic("backward", "dK and dV", "all_reduce", count * 2, whole)
            elif site.kind == "project_sequence":
                projected = d["B"] * d["Z"] * d["K"] * d["A"] * element_bytes
                for phase in [*forwards, "backward"]:
                    yield Traffic(phase, "Linformer's projected K, V", "all_reduce", count, projected)
            elif site.kind == "overflow_flag" and any(s.kind == "project_sequence" for s in sites):
                # only Linformer's projections differ between ranks, so only they can overflow on one alone
                yield Traffic("optimizer", "overflow of the loss scale", "all_reduce", count, 4)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        heads = q.shape[:2]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = RingScores.apply(q, k, self.group).unflatten(0, heads)
        probabilities = masked_softmax(scores, mask, q.shape[-1] ** -0.5, softmax)
        del scores
        probabilities = self.random.dropout(probabilities, dropout, self.outermost.attention_axes)
        return RingOutput.apply(probabilities.flatten(0, 1), v, self.group).unflatten(0, heads)

    def project_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        # each rank projects its own positions; the sum over ranks is the whole projection (section 3.3)
        return sum_over_group(super().project_sequence(x, weight), self.group)
