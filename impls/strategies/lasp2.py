"""LASP-2 (Sun et al., "Rethinking Sequence Parallelism for Linear Attention", arXiv 2502.07563, algorithm 2).

As in LASP, states connect the chunks, but no state travels from rank to rank. Every rank computes the state
of its own chunk, one all-gather gives each rank all states, and it sums the states of the chunks before its
own, decayed by the positions between. So no rank waits for another's kernels, and the all-gather runs while
the rank computes the outputs that need only its own chunk. Backward does the same with the gradients of the
states of the chunks after its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from spbench.impls.attended import Attended
from spbench.impls.collectives import start_all_gather
from spbench.impls.kernels import linear_attention as kernels
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.packed_linear_attention import LinearAttentionSteps
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.recurrent_chunks import Gather, RecurrentChunks
from spbench.impls.traffic import Traffic


class _Lasp2(torch.autograd.Function):
    """Linear attention of this rank's chunk: q, k [B, Z, L/N, D], v [B, Z, L/N, A] -> [B, Z, L/N, A]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, lasp: Lasp2, attended: Attended
    ) -> Tensor:
        block, length, chunk = kernels.BLOCK, k.shape[2], lasp.chunk(attended, k.shape[2])
        run = LinearAttentionSteps(chunk=chunk)
        queries, keys, values = kernels.contiguous(q, k, v)
        states = run.states(keys, values, decay, block)
        totals, gathered = start_all_gather(states[:, :, -1], lasp.group)
        o = run.output(queries, keys, values, decay, states, None, block)
        gathered.wait()
        # rank j's chunk ends rank - 1 - j whole chunks before this one starts
        before = [lasp.rank - 1 - j for j in range(lasp.size)]
        initial = _decayed_sum(totals, decay, length, lasp.of_one_document(before, attended, length))
        ctx.save_for_backward(q, k, v, decay, states, initial)
        ctx.lasp, ctx.run, ctx.attended = lasp, run, attended
        return o + ((q * _powers(decay, 1, q, chunk.lengths[0] if chunk else None)) @ initial.to(q.dtype))

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, states, initial = ctx.saved_tensors
        q, k, v, d_o = kernels.contiguous(q, k, v, d_o)
        lasp, run, block, length = ctx.lasp, ctx.run, kernels.BLOCK, k.shape[2]
        d_states = run.state_gradients(q, d_o, decay, block)
        totals, gathered = start_all_gather(d_states[:, :, 0], lasp.group)
        d_q, d_k, d_v = run.input_gradients(q, k, v, d_o, decay, states, initial, d_states, None, block)
        gathered.wait()
        after = [j - lasp.rank - 1 for j in range(lasp.size)]
        d_final = _decayed_sum(totals, decay, length, lasp.of_one_document(after, ctx.attended, length))
        reached = run.chunk.lengths[-1] if run.chunk else None
        to_end, d_final = _powers(decay, 0, k, reached).flip(-2), d_final.to(k.dtype)
        return d_q, d_k + (v * to_end) @ d_final.mT, d_v + (k * to_end) @ d_final, None, None, None


def _powers(decay: Tensor | None, first: int, x: Tensor, reached: int | None) -> Tensor:
    """exp(-s (first + i)) for position i of x [B, Z, L/N, D], as [Z or 1, L/N, 1] in x's dtype; 0 from
    position ``reached`` on, where another document begins."""
    state = kernels.state_dtype(x.dtype)
    distance = torch.arange(first, first + x.shape[2], device=x.device, dtype=state)
    powers = kernels.decay_powers(decay, distance).unsqueeze(-1).to(x.dtype)
    return powers if reached in (None, x.shape[2]) else powers * (distance < first + reached).unsqueeze(-1)


def _decayed_sum(totals: Tensor, decay: Tensor | None, length: int, chunks: list[int]) -> Tensor:
    """The sum [B, Z, D, A] of the N states in ``totals`` [N, B, Z, D, A]; state j is decayed over
    ``chunks[j]`` chunks of ``length`` positions. A negative number excludes a state."""
    distance = torch.tensor([float(n) for n in chunks], device=totals.device, dtype=totals.dtype)
    weights = kernels.decay_powers(decay, distance.clamp(min=0) * length) * (distance >= 0)
    return torch.einsum("nbzda,zn->bzda", totals, weights.expand(totals.shape[2], -1))


class Lasp2(RecurrentChunks):
    """Sequence chunks of which one all-gather gives every rank all states of linear attention."""

    name = "lasp2"
    summary = "sequence chunks; one all-gather of the states of linear attention"
    source = "arXiv 2502.07563, algorithm 2"
    meets = frozenset({"linear_attention", "gated_recurrence"})
    passing = Gather
    heeds = HEEDS_ALL

    def state_traffic(self, site: Site, state: int) -> Iterator[Traffic]:
        for phase in ["forward", "backward"] if site.recomputed else ["forward"]:
            yield Traffic(phase, "states", "all_gather", site.count, self.size * state)
        yield Traffic("backward", "gradients of the states", "all_gather", site.count, self.size * state)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        if self.size == 1:
            return super().linear_attention(q, k, v, mask)
        return _Lasp2.apply(q, k, v, mask.rates, self, mask.attended)

    def of_one_document(self, chunks: list[int], attended: Attended, length: int) -> list[int]:
        """``chunks``, the number of whole chunks between each rank's chunk and this rank's, with -1 where
        another document begins in between, and for chunks on the other side."""
        if not attended.documents:
            return chunks
        first = [attended.document_of(rank * length) for rank in range(self.size)]
        last = [attended.document_of((rank + 1) * length - 1) for rank in range(self.size)]
        here, lower, higher = self.rank, last[: self.rank], first[self.rank + 1 :]
        one = [*(x == first[here] for x in lower), False, *(x == last[here] for x in higher)]
        return [n if same else -1 for n, same in zip(chunks, one, strict=True)]
