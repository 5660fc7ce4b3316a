"""LASP (Sun et al., "Linear Attention Sequence Parallelism", arXiv 2404.02882, algorithms 2 and 3).

Every rank holds all weights and a chunk of L/N positions. Linear attention reaches other chunks only through
the state, the sum of k^T v (the paper's KV): D x A numbers a head, whatever the length. Forward, the state
travels along the ranks: each rank receives the state before its chunk, computes its outputs, adds its own
chunk to the state and sends the state on. Backward, the state's gradient (the paper's dKV) travels from last
to first. Each rank thus sends B Z D A numbers a layer forward and as many backward (the last rank none
forward, the first none backward). The paper's T is N, its C a chunk's L/N positions.

A rank receives before its kernels and sends after them, as in the authors' code, so the ranks take turns
within a layer. This wait is partly hidden, because a rank goes on to its next layer meanwhile.

Groups of ranks with sequences of their own (the paper's algorithm 1) are the mesh axes dp x sp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import exchange
from spbench.impls.kernels import linear_attention as kernels
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.packed_linear_attention import Chunk, LinearAttentionSteps
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.options import Options
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.recurrent_chunks import Chain, RecurrentChunks
from spbench.impls.traffic import Traffic


class _Lasp(torch.autograd.Function):
    """Linear attention of this rank's chunk: q, k [B, Z, L/N, D], v [B, Z, L/N, A] -> [B, Z, L/N, A]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, lasp: Lasp, chunk: Chunk | None
    ) -> Tensor:
        run, block = LinearAttentionSteps(lasp.options.kernel_fusion, chunk), kernels.BLOCK
        if lasp.options.barrier and lasp.group is not None:
            dist.barrier(lasp.group)
        initial = run.before(lasp.receive(lasp.rank - 1, k, v))
        queries, keys, values = kernels.contiguous(q, k, v)
        states = run.states(keys, values, decay, block)
        o = run.output(queries, keys, values, decay, states, initial, block)
        if lasp.rank < lasp.size - 1:
            lasp.send(run.final_state(states, initial, decay, k.shape[2]), lasp.rank + 1)
        ctx.save_for_backward(q, k, v, decay, *((states, initial) if lasp.options.state_caching else ()))
        ctx.lasp, ctx.run = lasp, run
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, *cached = ctx.saved_tensors
        lasp = ctx.lasp
        q, k, v, d_o = kernels.contiguous(q, k, v, d_o)
        run, block, length = ctx.run, kernels.BLOCK, k.shape[2]
        if cached:
            states, initial = cached
        else:  # the forward ring once more
            initial = run.before(lasp.receive(lasp.rank - 1, k, v))
            states = run.states(k, v, decay, block)
            if lasp.rank < lasp.size - 1:
                lasp.send(run.final_state(states, initial, decay, length), lasp.rank + 1)
        d_final = run.after(lasp.receive(lasp.rank + 1, k, v))
        d_states = run.state_gradients(q, d_o, decay, block)
        gradients = run.input_gradients(q, k, v, d_o, decay, states, initial, d_states, d_final, block)
        if lasp.rank > 0:
            lasp.send(run.initial_gradient(d_states, d_final, decay, length), lasp.rank - 1)
        return *gradients, None, None, None


@dataclass(frozen=True)
class LaspOptions(Options):
    """Options of :class:`Lasp`.

    Attributes:
        kernel_fusion: use fused kernels; else each step of the chunked algorithm runs as torch operators with
            intermediate tensors (the paper's ablation, section 4.4).
        state_caching: keep the states for backward; else backward computes them again, which takes the
            forward ring once more (the same ablation).
        barrier: all ranks wait for each other before each forward, as in the authors' lasp_fuse_parallel.py.
    """

    kernel_fusion: bool = True
    state_caching: bool = True
    barrier: bool = False


class Lasp(RecurrentChunks):
    """Sequence chunks along which the state of linear attention travels from rank to rank."""

    name = "lasp"
    usual = True
    summary = "sequence chunks; the state of linear attention travels along the ranks"
    source = "arXiv 2404.02882, section 3"
    meets = frozenset({"linear_attention", "gated_recurrence"})
    passing = Chain
    heeds = HEEDS_ALL
    options_type = LaspOptions
    options: LaspOptions

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        first, middle, last = [0], list(range(1, size - 1)), [size - 1]
        return [ranks for ranks in (middle, first, last if size > 1 else []) if ranks]

    def state_traffic(self, site: Site, state: int) -> Iterator[Traffic]:
        again = int(site.recomputed) + int(not self.options.state_caching)
        on, back = self.rank < self.size - 1, self.rank > 0
        yield Traffic("forward", "state", "send", on * site.count, state)
        yield Traffic("backward", "state, computed again", "send", on * again * site.count, state)
        yield Traffic("backward", "gradient of the state", "send", back * site.count, state)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        # LASP needs the state, so it has only the chunked way
        return _Lasp.apply(q, k, v, mask.rates, self, self.chunk(mask.attended, k.shape[2]))

    def receive(self, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
        """Receives a state or its gradient [B, Z, D, A] from rank ``peer`` of the group; returns None if the
        group has no such rank."""
        if not 0 <= peer < self.size:
            return None
        assert self.group is not None
        shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
        received = k.new_empty(shape, dtype=kernels.state_dtype(k.dtype))
        exchange([], [(received, peer)], self.group)
        return received

    def send(self, state: Tensor, peer: int) -> None:
        """Send a state or its gradient [B, Z, D, A] to rank ``peer``, which calls :meth:`receive`."""
        assert self.group is not None
        exchange([(state, peer)], [], self.group)
