"""Tensor parallelism (Megatron-LM, Shoeybi et al., arXiv 1909.08053, section 3).

The first projection of a block is split by columns, the second by rows, so that a block needs one all-reduce
forward (g, after the row-parallel projection) and one backward (f, before the column-parallel projection).
Attention heads are split with the columns. The embedding, the tied head and the cross entropy are split over
the vocabulary. Layer norms, dropout and everything else of shape [B, L, H] are replicated.

The cross entropy of split logits (torch's ``loss_parallel``) takes three small all-reduces. With whole
logits, as in torch without ``loss_parallel``, every rank gathers the logits of the whole vocabulary
and computes the loss of all tokens.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.collectives import all_gather_flat, copy_to_group, gather_from_group, reduce_from_group
from spbench.impls.kernels.cross_entropy import CrossEntropy, cross_entropy_of
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.projection import project
from spbench.impls.layout import HEEDS_ALL, divisors, nearest, nearest_divisors
from spbench.impls.options import Options, Saving
from spbench.impls.strategies.base import Shard, Site, Strategy, Unsupported, mark_shard, union
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.layers import (
    GroupedLinear,
    GroupedQueryLinear,
    Linear,
    SeparateLinear,
    full_precision,
)
from spbench.impls.strategies.parallel_layers import (
    ColumnParallelGroupedLinear,
    ColumnParallelGroupedQuery,
    ColumnParallelLinear,
    ColumnParallelSeparateLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from spbench.impls.strategies.planning import ParameterKind
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class TensorParallelOptions(Options):
    """Options of :class:`TensorParallel`.

    Attributes:
        loss: "parallel": the cross entropy is computed from logits that stay split over the vocabulary;
            "gathered": from logits that every rank gathers; "gathered_float32": like "gathered", with each
            rank's part cast to float32 before it is sent.
    """

    loss: str = "parallel"

    words: ClassVar[Mapping[str, Collection[str]]] = {"loss": ("parallel", "gathered", "gathered_float32")}

    def savings(self) -> Iterator[Saving]:
        if self.loss != "parallel":
            yield Saving({"loss": "parallel"}, "the loss is computed from logits that stay split")


class TensorParallel(Strategy):
    """Splits weights by columns, then by rows; every rank has all positions [B, L, H] between blocks."""

    name = "tensor_parallel"
    axes: tuple[str, ...] = ("tp",)
    options_type: ClassVar[type[Options]] = TensorParallelOptions
    options: TensorParallelOptions
    summary = "weights split by columns and rows, heads and vocabulary with them (Megatron-LM)"
    source = "arXiv 1909.08053, section 3"
    heeds = HEEDS_ALL
    splits_features = True
    can_enclose = True
    #: the dims of sites that N must divide, by letter, with the name that errors use
    split_dims: ClassVar[Mapping[str, str]] = {
        "Z": "attention heads",
        "F": "features",
        "V": "vocabulary rows",
    }

    def check_sizes(self, sites: Sequence[Site]) -> None:
        size = self.size
        for site in sites:
            self._check_groups(site)
        totals = [
            (site.dims[letter], what)
            for letter, what in self.split_dims.items()
            for site in sites
            if letter in site.dims
        ]
        for total, what in totals:
            if total % size:
                # N must divide the other totals too, except the vocabulary, which is padded to suit any N
                common = math.gcd(*(t for t, w in totals if w == what or w != "vocabulary rows"))
                raise Unsupported(
                    f"{total} {what} cannot be split over {size} ranks",
                    f"use {nearest_divisors(common, size)}",
                )

    def _check_groups(self, site: Site) -> None:
        heads, kv_heads = site.dims.get("Z", 0), site.dims.get("G", self.size)
        if site.kind in ("separate_linear_in", "gated_recurrence") and kv_heads % self.size:
            of = "keys and values" if site.kind == "separate_linear_in" else "keys of a recurrence"
            mend = ", or leave out separate_projections" if site.kind == "separate_linear_in" else ""
            raise Unsupported(
                f"{self.size} ranks do not divide {kv_heads} heads of {of}",
                f"use {nearest_divisors(kv_heads, self.size)}{mend}",
            )
        if kv_heads % self.size and self.size % kv_heads:
            fitting = [n for n in divisors(heads) if not (kv_heads % n and n % kv_heads)]
            raise Unsupported(
                f"{self.size} ranks neither divide {kv_heads} heads of keys and values nor are a multiple",
                f"use {nearest(fitting, self.size)}",
            )

    def replicas(self, kv_heads: int) -> int:
        """The number of ranks that hold the same head of keys and values, of ``kv_heads`` heads in all."""
        return max(1, self.size // kv_heads)

    def replica_traffic(self, site: Site, element_bytes: int) -> Iterator[Traffic]:
        """Yields the all-reduces of the gradients of weights of keys and values that several ranks hold, at a
        site of the kind grouped_query_linear_in."""
        d = site.dims
        if d.get("frozen"):
            return
        payload, replicas = 2 * d["A"] * d["H"] * element_bytes, self.replicas(d["G"])
        purpose = "gradient of replicated keys' and values' weights"
        yield Traffic("backward", purpose, "all_reduce", site.count, payload, run=replicas)
        if d.get("bias"):
            payload //= d["H"]
            yield Traffic("backward", "and of their biases", "all_reduce", site.count, payload, run=replicas)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            d, count = site.dims, site.count
            forwards = ["forward", "backward"] if site.recomputed else ["forward"]
            hidden = d.get("B", 0) * d.get("L", 0) * d.get("H", 0) * element_bytes
            if site.kind == "linear_in":
                yield Traffic("backward", "f: gradient of a block's input", "all_reduce", count, hidden)
            elif site.kind == "linear_in_text":
                words = d["B"] * d["W"] * d["H"] * element_bytes
                yield Traffic("backward", "f: gradient of the text", "all_reduce", count, words)
            elif site.kind in ("linear_out", "embedding"):
                for phase in forwards:
                    yield Traffic(phase, "g: output of a block", "all_reduce", count, hidden)
            elif site.kind == "vocabulary_logits":
                yield Traffic("backward", "f: gradient of the head's input", "all_reduce", count, hidden)
            elif site.kind == "project_sequence":
                weight = d["K"] * d["L"] * element_bytes
                yield Traffic(
                    "backward", "f: gradient of Linformer's projection", "all_reduce", count, weight
                )
            elif site.kind.startswith("cross_entropy") and self.gathers_logits:
                each = max(4, element_bytes) if self.options.loss == "gathered_float32" else element_bytes
                logits = d["B"] * d["L"] * d["V"] * each
                yield Traffic("forward", "logits", "all_gather", count, logits)
            elif site.kind == "cross_entropy_in_place":
                parts = 3 * d["B"] * d["L"] * max(4, element_bytes) * self.size
                yield Traffic("forward", "cross entropy", "all_gather", count, parts)
            elif site.kind in ("cross_entropy", "cross_entropy_native"):
                # largest logit, label's logit, sum of exponentials, in at least float32; the native way sends
                # the last two together
                tokens = d["B"] * d["L"] * max(4, element_bytes)
                together = [tokens, tokens] if site.kind == "cross_entropy" else [2 * tokens]
                for payload in (tokens, *together):
                    yield Traffic("forward", "cross entropy", "all_reduce", count, payload)
            elif site.kind == "grouped_query_linear_in":
                yield from self.replica_traffic(site, element_bytes)
            elif site.kind == "shared_by_heads":
                payload = d["A"] * element_bytes
                yield Traffic("backward", "f: gradient of what heads share", "all_reduce", count, payload)
            elif site.kind == "overflow_flag":
                yield Traffic("optimizer", "overflow of the loss scale", "all_reduce", count, 4)

    def mark(self, parameter: nn.Parameter, dim: int = 0) -> nn.Parameter:
        """Record on a parameter that it is this rank's part along ``dim``; returns the parameter."""
        return mark_shard(parameter, Shard(self.axes[0], dim, self.rank, self.size))

    def inside(self, site: Site) -> Site:
        split = {letter: site.dims[letter] // self.size for letter in ("Z", "F") if letter in site.dims}
        if "G" in site.dims:
            split["G"] = max(1, site.dims["G"] // self.size)
        return replace(site, dims={**site.dims, **split})

    @property
    def attention_axes(self) -> tuple[str, ...]:
        # the heads are this rank's own, everything else is replicated
        return union(self.axes, super().attention_axes)

    @property
    def wire_axes(self) -> tuple[str, ...]:
        return self.axes

    def to_wire(self, x: Tensor) -> Tensor:
        # every rank holds the same x, so each sends a part of it (Megatron-LM's scatter-gather, arXiv
        # 2104.04473 section 4.1)
        return x.flatten().chunk(self.size)[self.rank]

    def from_wire(self, received: Tensor, shape: Sequence[int]) -> Tensor:
        if self.group is None or self.size == 1:
            return received.view(shape)
        return all_gather_flat(received, self.group).view(shape)

    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        others = super().split_over(kind)
        return union(self.axes, others) if kind in ("features", "mlp", "key_value", "vocabulary") else others

    def enter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """f, then the column-parallel projection that opens a block: x [B, L, H] -> [B, L, F/N]."""
        return project(copy_to_group(x, self.group), weight, bias)

    def leave(self, x: Tensor) -> Tensor:
        """g: all-reduces the ranks' partial outputs x of a block to their sum [B, L, H]."""
        return reduce_from_group(x, self.group)

    def linear_in(self, in_features: int, out_features: int) -> Linear:
        return ColumnParallelLinear(in_features, out_features, self)

    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        return self.linear_in(in_features, out_features)

    def grouped_linear_in(
        self, in_features: int, out_features: int, groups: int, *, bias: bool = False
    ) -> GroupedLinear:
        return ColumnParallelGroupedLinear(in_features, out_features, groups, self, bias=bias)

    def whole_input(self, x: Tensor) -> Tensor:
        """f without a projection: the input x [B, L, H] of several projections, whose gradients of x are
        added up before one all-reduce."""
        return copy_to_group(x, self.group)

    def separate_linear_in(
        self, in_features: int, out_features: Sequence[int], *, bias: bool = False
    ) -> SeparateLinear:
        return ColumnParallelSeparateLinear(in_features, out_features, self, bias=bias)

    def grouped_query_linear_in(
        self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False
    ) -> GroupedQueryLinear:
        return ColumnParallelGroupedQuery(in_features, head_size, heads, kv_heads, self, bias=bias)

    def shared_by_heads(self, weight: Tensor) -> Tensor:
        # the heads of this rank make only a part of the weight's gradient
        return super().shared_by_heads(copy_to_group(weight, self.group))

    def features_for_heads(self, x: Tensor) -> Tensor:
        # the heads of this rank make only a part of the gradient
        return self.whole_input(super().features_for_heads(x))

    def linear_out(self, in_features: int, out_features: int) -> Linear:
        return RowParallelLinear(in_features, out_features, self)

    def embedding(self, vocabulary: int, hidden: int) -> nn.Module:
        return VocabParallelEmbedding(vocabulary, hidden, self)

    def vocabulary_parameter(self, *shape: int) -> nn.Parameter:
        rows, *rest = shape
        return self.mark(nn.Parameter(torch.zeros(rows // self.size, *rest)))

    def feature_parameter(self, initial: Tensor) -> nn.Parameter:
        return self.mark(super().feature_parameter(initial.chunk(self.size)[self.rank].clone()))

    @property
    def vocabulary_parts(self) -> int:
        return super().vocabulary_parts * self.size

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        own = mask.of_heads(lambda rates: rates.chunk(self.size)[self.rank])
        return super().linear_attention(q, k, v, own)

    def project_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        # all heads share the weight, and this rank's heads make only their part of its gradient
        return super().project_sequence(x, copy_to_group(weight, self.group))

    def vocabulary_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().vocabulary_logits(copy_to_group(x, self.group), weight, bias)

    @property
    def gathers_logits(self) -> bool:
        """Whether logits are gathered for the loss."""
        return self.options.loss != "parallel" and self.size > 1

    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str | CrossEntropy) -> Tensor:
        if self.gathers_logits:
            if self.options.loss == "gathered_float32":
                logits = full_precision(logits)
            whole = gather_from_group(logits, logits.ndim - 1, self.group)
            return Strategy.cross_entropy(self, whole, labels, way=way)
        if way == "as_given" and self.size > 1:
            what = "cross_entropy as_given, torch's own loss, takes no logits that are split"
            raise Unsupported(what, "use strategy_options.loss gathered")
        # torch's "plain" loss takes no split logits either
        return cross_entropy_of("fused" if way == "plain" else way)(logits, labels, self.group)
