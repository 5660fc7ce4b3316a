"""Megatron-LM's sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Tensor parallelism replicates what lies between the blocks: norms, dropout, residuals. Here each rank has
only L/N positions of that. The all-reduces f and g fall into their halves: a block begins by gathering all
positions for its column-parallel projection, and ends by reduce-scattering the output of its row-parallel
one; backward does the reverse. An all-reduce is a reduce-scatter and an all-gather, so as many bytes are
sent, but for one more all-gather in backward: a rank keeps only its own positions of a block's input, and
gathers the others again for the gradient of the weight.

The heads and features of a block are split; the vocabulary is not: embedding, head and loss act on this
rank's positions, which makes as many logits as splitting them over the vocabulary, and no message. All
weights that are not split see some of the positions only, so their gradients are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.collectives import (
    joined,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from spbench.impls.strategies.base import Site, Strategy, union
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.linear import Linear
from spbench.impls.strategies.sequence_chunks import GridChunks
from spbench.impls.strategies.tensor_parallel import ColumnParallelLinear, TensorParallel
from spbench.impls.traffic import Traffic


class GatheredProjection(torch.autograd.Function):
    """x [B, .., L/N, .., H] of all ranks, whose positions lie along ``dim``, weight [F/N, H], bias [F/N] or
    None -> [B, .., L, .., F/N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.group = dim, group
        parts, arrival = start_all_gather(x, group)
        arrival.wait()
        return F.linear(joined(parts, dim), weight, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # both messages travel while a matrix product runs, as in section 4.2.2
        parts, arrival = start_all_gather(x, ctx.group)
        whole_d_x = d_y @ weight
        arrival.wait()
        d_x, departure = start_reduce_scatter(whole_d_x, ctx.dim, ctx.group)
        d_rows = d_y.flatten(0, -2)
        d_weight = d_rows.mT @ joined(parts, ctx.dim).flatten(0, -2)
        d_bias = d_rows.sum(0) if ctx.needs_input_grad[2] else None
        departure.wait()
        return d_x, d_weight, d_bias, None, None


class _OfWholeText(ColumnParallelLinear):
    """Of an input that every rank has whole, and to whose gradient each adds its columns' part alone: nothing
    to gather, and nothing to scatter, for the gradients of what made the input are summed anyway."""

    forward = Linear.forward


class MegatronSP(GridChunks, TensorParallel):
    """Sequence chunks (:class:`SequenceChunks`) for inputs and between blocks, tensor parallelism
    (:class:`TensorParallel`) inside blocks."""

    name = "megatron_sp"
    axes = ("tp",)
    summary = "tensor parallelism, and sequence chunks between its blocks (Megatron-LM)"
    source = "arXiv 2205.05198, section 4.2.2"
    meets = TensorParallel.meets
    split_dims = {"Z": "attention heads", "F": "features"}

    # inside a block all positions are there, as the strategy within leaves them; so is a weight with a column
    # a position, whose gradient is then a sum over the heads of all ranks, as is that of what heads share
    grid_attention = Strategy.grid_attention
    block_part = Strategy.block_part
    sequence_parameter = Strategy.sequence_parameter
    project_sequence = Strategy.project_sequence
    shared_by_heads = Strategy.shared_by_heads
    # the vocabulary is whole, and what goes to another stage is a part already
    embedding = Strategy.embedding
    vocabulary_parameter = Strategy.vocabulary_parameter
    vocabulary_parts = Strategy.vocabulary_parts
    vocabulary_logits = Strategy.vocabulary_logits
    cross_entropy = Strategy.cross_entropy
    wire_axes = Strategy.wire_axes
    to_wire = Strategy.to_wire
    from_wire = Strategy.from_wire

    def check_sizes(self, sites: Sequence[Site]) -> None:
        TensorParallel.check_sizes(self, sites)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            count = site.count
            forwards = ["forward", "backward"] if site.recomputed else ["forward"]
            if site.kind in ("linear_in", "linear_out"):
                hidden = site.dims["B"] * site.dims["L"] * site.dims["H"] * element_bytes
            if site.kind == "linear_in":
                for phase in forwards:
                    yield Traffic(phase, "input of a block", "all_gather", count, hidden)
                yield Traffic("backward", "input of a block, again", "all_gather", count, hidden)
                yield Traffic("backward", "gradient of a block's input", "reduce_scatter", count, hidden)
            elif site.kind == "linear_out":
                for phase in forwards:
                    yield Traffic(phase, "output of a block", "reduce_scatter", count, hidden)
                yield Traffic("backward", "gradient of a block's output", "all_gather", count, hidden)
            elif site.kind == "grouped_query_linear_in":
                yield from self.replica_traffic(site, element_bytes)
            elif site.kind == "overflow_flag":
                yield Traffic("optimizer", "overflow of the loss scale", "all_reduce", count, 4)

    def split_over(self, kind: str) -> tuple[str, ...]:
        others = Strategy.split_over(self, kind)
        return union(self.axes, others) if kind in ("features", "key_value") else others

    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        return _OfWholeText(in_features, out_features, self)

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [B, L/N, H] -> [B, L, F/N], or so along the dim of a grid that is cut."""
        if self.size == 1:
            return F.linear(x, weight, bias)
        return GatheredProjection.apply(x, weight, bias, self.cut_dim(x), self.group)

    def leave(self, x: Tensor) -> Tensor:
        """This rank's part [B, L, H] of the sum -> its positions [B, L/N, H] of the sum, or so along the dim
        of a grid that is cut."""
        return reduce_scatter(x, self.cut_dim(x), self.group)

    def cut_dim(self, x: Tensor) -> int:
        """The dim of x [B, L, H] or [B, n1, .., nK, H] that is cut."""
        return 1 + self.grid_dim if x.ndim > 3 else 1
