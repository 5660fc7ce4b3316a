"""Megatron-LM's sequence parallelism (Megatron-SP; Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Tensor parallelism replicates the work between the blocks: norms, dropout, residuals. Here each rank does this
work for L/N positions. The all-reduces f and g are split into halves: a block begins by gathering all
positions for its column-parallel projection, and ends by reduce-scattering the output of its row-parallel
projection; backward does the reverse. An all-reduce is a reduce-scatter and an all-gather, so the bytes are
the same, except for one more all-gather in backward: a rank keeps only its own positions of a block's input,
and gathers the other positions again for the gradient of the weight.

Heads and features of a block are split; the vocabulary is split only if an option says so. Otherwise
embedding, head and loss act on this rank's positions, which gives as many logits as a split vocabulary and
needs no message. Weights that are not split see only some positions, so their gradients are summed over the
ranks. With a split vocabulary the ids and labels of all positions are gathered, 8 bytes each, whereas
Megatron-LM's data loader gives every rank all ids and labels.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.collectives import (
    all_gather,
    joined,
    reduce_scatter,
    scatter_to_group,
    start_all_gather,
    start_reduce_scatter,
)
from spbench.impls.kernels.cross_entropy import CrossEntropy
from spbench.impls.kernels.fp8_gathered import project_gathered
from spbench.impls.kernels.projection import (
    bias_gradient,
    input_gradient,
    library_of,
    multiply,
    project,
    weight_gradient,
)
from spbench.impls.layout import runs_again
from spbench.impls.options import Saving
from spbench.impls.strategies.base import Site, Strategy, union
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.planning import ParameterKind
from spbench.impls.strategies.sequence_chunks import GridChunks, GridOptions
from spbench.impls.strategies.tensor_parallel import (
    ColumnParallelLinear,
    TensorParallel,
    TensorParallelOptions,
    VocabParallelEmbedding,
)
from spbench.impls.traffic import Traffic

_VOCABULARY_SITES = (
    "embedding",
    "vocabulary_logits",
    "cross_entropy",
    "cross_entropy_in_place",
    "cross_entropy_native",
)


class GatheredProjection(torch.autograd.Function):
    """The positions of all ranks of x [B, .., L/N, .., H], which lie along ``dim``, times weight [F/N, H]
    plus bias [F/N] or None -> [B, .., L, .., F/N]. ``buffer`` lends the memory for the gathered x; None: new
    memory, freed afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        dim, group, buffer = how
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias, ctx.dim, ctx.group, ctx.buffer = weight, bias, dim, group, buffer
        parts, arrival = start_all_gather(x, group, buffer)
        arrival.wait()
        return multiply(joined(parts, dim), weight, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if x is None:  # the weight is frozen
            d_x, departure = start_reduce_scatter(input_gradient(d_y, ctx.weight), ctx.dim, ctx.group)
            departure.wait()
            return d_x, None, None, None, None, None
        # both messages travel while a matmul runs, as in section 4.2.2
        parts, arrival = start_all_gather(x, ctx.group, ctx.buffer)
        whole_d_x = input_gradient(d_y, ctx.weight)
        arrival.wait()
        d_x, departure = start_reduce_scatter(whole_d_x, ctx.dim, ctx.group)
        d_weight = weight_gradient(d_y, joined(parts, ctx.dim), ctx.weight)
        d_bias = None if ctx.bias is None else bias_gradient(d_y, ctx.bias)
        departure.wait()
        return d_x, d_weight, d_bias, None, None, None


def whole_ids(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gathers token ids or labels x [B, L/N] of all ranks: [B, L]."""
    parts, arrival = start_all_gather(x, group)
    arrival.wait()
    return joined(parts, 1)


@dataclass(frozen=True)
class MegatronSPOptions(TensorParallelOptions, GridOptions):
    """Options of :class:`MegatronSP`.

    Attributes:
        vocabulary: "whole": embedding, head and loss act on this rank's positions, each rank with all rows of
            the vocabulary; "split", as in Megatron-LM: on all positions, each rank with its rows.
        loss: for a split vocabulary, as in :class:`TensorParallelOptions`.
        gathered: the memory of gathered inputs: "made" and freed each time, or "reused", as Megatron-LM's own
            layers (library: megatron-local) always do.
        userbuffers: TransformerEngine runs the collectives of projections in parts while matmuls run, and has
            further workspaces for that (``get_cublas_workspace`` of
            transformer_engine/pytorch/cpp_extensions/gemm.py since 2.10). spbench counts these workspaces,
            but waits for the collectives, and gathered inputs are tensors, not communication buffers.
    """

    vocabulary: str = "whole"
    gathered: str = "made"
    userbuffers: bool = False

    words = {
        **TensorParallelOptions.words,
        "vocabulary": ("whole", "split"),
        "gathered": ("made", "reused"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss != "parallel" and self.vocabulary == "whole":
            raise ValueError(f"loss {self.loss}: the logits are whole already; use it with vocabulary: split")

    def variants(self) -> Iterator[Mapping[str, Any]]:
        yield from super().variants()
        yield from ({"vocabulary": "split", "loss": each} for each in ("gathered", "gathered_float32"))

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yields the settings that a search for the fastest layout tries (:meth:`Options.searched`)."""
        for vocabulary in ("split", "whole"):
            yield {"vocabulary": vocabulary}

    def savings(self) -> Iterator[Saving]:
        if self.vocabulary == "whole":
            yield Saving({"vocabulary": "split"}, "each rank has its rows of the vocabulary alone")
        yield from super().savings()


def _in_eight_bits(site: Site, nbytes: int) -> int:
    """Bytes of the gathered input of a projection: eight bits an element and the scales of its rows, or
    ``nbytes`` where the input is not in eight bits."""
    if "fp8_tile" not in site.dims:
        return nbytes
    d, tile = site.dims, site.dims["fp8_tile"]
    of_scales = site.dims["fp8_scale_bytes"] * math.ceil(d["H"] / tile) if tile else 0
    return d["B"] * d["L"] * (d["H"] + of_scales)


class SequenceVocabEmbedding(VocabParallelEmbedding):
    """Token ids [B, L/N] -> [B, L/N, H]; each rank holds V/N rows of the table [V, H]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return reduce_scatter(self.own_rows(whole_ids(tokens, self.group)), 1, self.group)


class _OfWholeText(ColumnParallelLinear):
    """A column-parallel projection of an input that every rank has whole, so nothing is gathered. Each rank
    returns only its columns' part of the input's gradient, because the gradients of the weights behind the
    input are summed over ranks later."""

    forward = Linear.forward


class MegatronSP(GridChunks, TensorParallel):
    """Sequence chunks (:class:`SequenceChunks`) for inputs and between blocks, tensor parallelism
    (:class:`TensorParallel`) inside blocks."""

    name = "megatron_sp"
    usual = True
    axes: tuple[str, ...] = ("tp",)
    options_type = MegatronSPOptions
    options: MegatronSPOptions
    summary = "tensor parallelism, and sequence chunks between its blocks (Megatron-LM)"
    source = "arXiv 2205.05198, section 4.2.2"
    meets = TensorParallel.meets

    @property
    def split_dims(self) -> Mapping[str, str]:  # type: ignore[override]
        dims = {"Z": "attention heads", "F": "features"}
        return dims | ({"V": "vocabulary rows"} if self.options.vocabulary == "split" else {})

    # Inside a block a rank has all positions, so these hooks are those of a single device. Each rank's heads
    # add a part to the gradient of a weight that heads share, or that has a column for each position.
    grid_attention = Strategy.grid_attention
    block_part = Strategy.block_part
    sequence_parameter = Strategy.sequence_parameter
    project_sequence = Strategy.project_sequence
    shared_by_heads = Strategy.shared_by_heads
    # hidden states between blocks are chunks already: each rank sends its own
    wire_axes = Strategy.wire_axes
    to_wire = Strategy.to_wire
    from_wire = Strategy.from_wire

    @property
    def _splits_vocabulary(self) -> bool:
        return self.options.vocabulary == "split" and self.size > 1

    @property
    def vocabulary_parts(self) -> int:
        # below this class comes TensorParallel, whose ranks split the vocabulary
        parts = super().vocabulary_parts
        return parts if self.options.vocabulary == "split" else parts // self.size

    def embedding(self, vocabulary: int, hidden: int) -> nn.Module:
        if self._splits_vocabulary:
            return SequenceVocabEmbedding(vocabulary, hidden, self)
        return Strategy.embedding(self, vocabulary, hidden)

    def vocabulary_parameter(self, *shape: int) -> nn.Parameter:
        of = TensorParallel if self._splits_vocabulary else Strategy
        return of.vocabulary_parameter(self, *shape)

    def vocabulary_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._splits_vocabulary:
            # Megatron-LM's own column-parallel layer, which gathers into its global memory buffer
            return GatheredProjection.apply(x, weight, bias, 1, self.group, self.buffer)
        return Strategy.vocabulary_logits(self, x, weight, bias)

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str | CrossEntropy) -> Tensor:
        if not self._splits_vocabulary:
            return Strategy.cross_entropy(self, logits, labels, way=way)
        loss = TensorParallel.cross_entropy(self, logits, whole_ids(labels, self.group), way=way)
        return scatter_to_group(loss, 1, self.group)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        TensorParallel.check_sizes(self, sites)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            count = site.count
            forwards = ["forward", "backward"] if runs_again(site) else ["forward"]
            if site.kind in ("linear_in", "linear_out"):
                hidden = site.dims["B"] * site.dims["L"] * site.dims["H"] * element_bytes
            if site.kind == "linear_in":
                sent = _in_eight_bits(site, hidden)
                for phase in forwards:
                    yield Traffic(phase, "input of a block", "all_gather", count, sent)
                    if site.dims.get("fp8_tile") == 0:
                        largest = max(4, element_bytes)
                        yield Traffic(phase, "largest of a block's input", "all_reduce", count, largest)
                if not (site.dims.get("gathered_once") or site.dims.get("frozen")):
                    yield Traffic("backward", "input of a block, again", "all_gather", count, sent)
                yield Traffic("backward", "gradient of a block's input", "reduce_scatter", count, hidden)
            elif site.kind == "linear_out":
                for phase in forwards:
                    yield Traffic(phase, "output of a block", "reduce_scatter", count, hidden)
                yield Traffic("backward", "gradient of a block's output", "all_gather", count, hidden)
            elif site.kind == "grouped_query_linear_in":
                yield from self.replica_traffic(site, element_bytes)
            elif self.options.vocabulary == "split" and site.kind in _VOCABULARY_SITES:
                yield from self._vocabulary_traffic(site, element_bytes)
            elif site.kind == "overflow_flag":
                yield Traffic("optimizer", "overflow of the loss scale", "all_reduce", count, 4)

    def _vocabulary_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        d, count = site.dims, site.count
        tokens, hidden = d["B"] * d["L"], d["B"] * d["L"] * d.get("H", 0) * element_bytes
        if site.kind == "embedding":
            yield Traffic("forward", "token ids", "all_gather", count, tokens * 8)
            yield Traffic("forward", "embedded tokens", "reduce_scatter", count, hidden)
            if not d.get("frozen"):
                yield Traffic("backward", "gradient of embedded tokens", "all_gather", count, hidden)
        elif site.kind == "vocabulary_logits":
            for phase in ("forward",) if d.get("frozen") else ("forward", "backward"):
                yield Traffic(phase, "input of the head", "all_gather", count, hidden)
            yield Traffic("backward", "gradient of the head's input", "reduce_scatter", count, hidden)
        else:
            yield Traffic("forward", "labels", "all_gather", count, tokens * 8)
            precise = tokens * max(4, element_bytes)
            yield Traffic("backward", "gradient of tokens' losses", "all_gather", count, precise)
            yield from TensorParallel.communication(self, [site], element_bytes)

    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        others = Strategy.split_over(self, kind)
        whole = {"sequence", "others"} | ({"vocabulary"} if self.options.vocabulary == "whole" else set())
        return others if kind in whole else union(self.axes, others)

    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        return _OfWholeText(in_features, out_features, self)

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All-gathers x [B, L/N, H], or a grid along its cut dim, and projects it: [B, L, F/N]."""
        if self.size == 1:
            return project(x, weight, bias)
        if (recipe := getattr(weight, "spbench_fp8", None)) is not None:
            return project_gathered(x, weight, bias, recipe, self.cut_dim(x), self.group)  # type: ignore[arg-type]
        # Megatron-LM's own layers gather into its global memory buffer
        reused = library_of(weight) == "megatron-local" or self.options.gathered == "reused"
        buffer = self.buffer if reused else None
        return GatheredProjection.apply(x, weight, bias, self.cut_dim(x), self.group, buffer)

    def whole_input(self, x: Tensor) -> Tensor:
        """All-gathers x [B, L/N, H] -> [B, L, H], which backward keeps for its matmuls."""
        return all_gather(x, self.cut_dim(x), self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Closes a block: reduce-scatters the ranks' partial outputs x [B, L, H], or grids along the cut dim
        -> this rank's positions [B, L/N, H] of the sum."""
        return reduce_scatter(x, self.cut_dim(x), self.group)

    def cut_dim(self, x: Tensor) -> int:
        """The dim of x [B, L, H] or [B, n1, .., nK, H] that is cut."""
        return 1 + self.grid_dim if x.ndim > 3 else 1
