"""Odysseus (github.com/feifeibear/Odysseus-Transformer): attention by tensor and sequence parallelism, MLPs
on each rank's own positions.

Attention works as in :mod:`spbench.impls.strategies.megatron_sp`: its weights are split over the ranks, its
input gathered and its output reduce-scattered. Tensor parallelism of an MLP sends fewer bytes than the MLP's
weights have if sequences are short, and more if sequences are long. So here the MLP acts on
L/N positions with all its features, and sends no activations. Either its weights are whole on every rank, for
a backend to shard; or each rank has some of their rows and gathers all rows for every matmul, forward and
backward, and reduce-scatters their gradient, as in ZeRO-3 (the program's LinearZeRO3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import ReusedBuffer, joined, start_all_gather, start_reduce_scatter
from spbench.impls.kernels.projection import input_gradient, multiply, weight_gradient
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.strategies.layers import GroupedLinear, LayerHooks, Linear, SeparateLinear
from spbench.impls.strategies.megatron_sp import MegatronSP, MegatronSPOptions
from spbench.impls.strategies.planning import ParameterKind
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class OdysseusOptions(MegatronSPOptions):
    """Options of :class:`Odysseus`.

    Attributes:
        mlp: the weights of MLPs: "whole" on every rank, or "gathered" from all ranks for each matmul.
    """

    mlp: str = "whole"

    words = {**MegatronSPOptions.words, "mlp": ("whole", "gathered")}


class _GatheredWeight(torch.autograd.Function):
    """x [B, L/N, .., H] times the whole weight, which is gathered from each rank's part along ``dim``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dim: int, group: dist.ProcessGroup, buffer: ReusedBuffer | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.dim, ctx.group, ctx.buffer = weight, dim, group, buffer
        return multiply(x, _whole(weight, dim, group, buffer), None)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        whole = _whole(ctx.weight, ctx.dim, ctx.group, ctx.buffer)
        d_x = input_gradient(d_y, whole)
        d_whole = weight_gradient(d_y, x, whole)
        d_weight, departure = start_reduce_scatter(d_whole, ctx.dim, ctx.group)
        departure.wait()
        return d_x, d_weight, None, None, None


def _whole(weight: Tensor, dim: int, group: dist.ProcessGroup, buffer: ReusedBuffer | None) -> Tensor:
    parts, arrival = start_all_gather(weight.detach(), group, buffer)
    arrival.wait()
    return joined(parts, dim)


class _GatheredLinear(Linear):
    """x [..., in_features] -> x W^T [..., out_features], where a rank holds 1/N of the rows of W."""

    def __init__(self, in_features: int, out_features: int, odysseus: Odysseus):
        super().__init__(in_features, out_features // odysseus.size, bias=False)
        self.odysseus = odysseus
        odysseus.mark(self.weight)

    def project(self, x: Tensor) -> Tensor:
        return self.odysseus.times_gathered(x, self.weight, 0)

    forward = project


class _GatheredGroupedLinear(GroupedLinear):
    """Several projections of one input; a rank holds 1/N of the rows of each weight."""

    def __init__(self, in_features: int, out_features: int, groups: int, odysseus: Odysseus):
        super().__init__(in_features, out_features // odysseus.size, groups)
        self.odysseus, self.shape = odysseus, (groups, out_features)
        odysseus.mark(self.weight, dim=1)

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.odysseus.times_gathered(x, self.weight, 1)

    def _groups(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, self.shape)


class _GatheredSeparateLinear(SeparateLinear):
    """Several projections of one input, one matmul each; a rank holds 1/N of the rows of each weight."""

    def __init__(self, in_features: int, out_features: Sequence[int], odysseus: Odysseus):
        super().__init__(in_features, [n // odysseus.size for n in out_features])
        self.odysseus = odysseus
        for weight in self.weights:
            odysseus.mark(weight)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.odysseus.times_gathered(x, weight, 0) for weight in self.weights)


class _OwnPositions(LayerHooks):
    """The projections of an MLP that acts on this rank's positions."""

    def __init__(self, odysseus: Odysseus):
        self.odysseus, self.within = odysseus, odysseus.within
        self.gathers = odysseus.options.mlp == "gathered" and odysseus.size > 1

    def grouped_linear_in(
        self, in_features: int, out_features: int, groups: int, *, bias: bool = False
    ) -> GroupedLinear:
        if not self.gathers:
            return super().grouped_linear_in(in_features, out_features, groups, bias=bias)
        return _GatheredGroupedLinear(in_features, out_features, groups, self.odysseus)

    def separate_linear_in(
        self, in_features: int, out_features: Sequence[int], *, bias: bool = False
    ) -> SeparateLinear:
        if not self.gathers:
            return super().separate_linear_in(in_features, out_features, bias=bias)
        return _GatheredSeparateLinear(in_features, out_features, self.odysseus)

    def linear_out(self, in_features: int, out_features: int) -> Linear:
        if self.gathers:
            return _GatheredLinear(in_features, out_features, self.odysseus)
        return super().linear_out(in_features, out_features)


class Odysseus(MegatronSP):
    """:class:`MegatronSP`, except that the MLPs of decoders act on each rank's own positions."""

    name = "odysseus"
    options_type = OdysseusOptions
    options: OdysseusOptions
    summary = "attention as megatron_sp, MLPs on each rank's positions with whole or gathered weights"
    source = "github.com/feifeibear/Odysseus-Transformer"

    @property
    def of_mlp(self) -> LayerHooks:
        return _OwnPositions(self)

    def times_gathered(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        """x times the whole of a weight, which is gathered from all ranks along ``dim``."""
        buffer = self.buffer if self.options.gathered == "reused" else None
        y: Tensor = _GatheredWeight.apply(x, weight, dim, self.group, buffer)
        return y

    def split_over(self, kind: ParameterKind) -> tuple[str, ...]:
        if kind == "mlp" and self.options.mlp == "whole":
            return Strategy.split_over(self, kind)
        return super().split_over(kind)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        gathered = self.options.mlp == "gathered"
        if gathered and self.size > 1 and any({"mlp", "bias"} <= site.dims.keys() for site in sites):
            raise Unsupported("mlp: gathered has no biases, which this model's MLPs have", "use mlp: whole")
        if gathered and self.size > 1 and any({"mlp", "frozen"} <= site.dims.keys() for site in sites):
            raise Unsupported("mlp: gathered has no adapters beside frozen weights", "use mlp: whole")
        if gathered and self.size > 1 and any({"mlp", "fp8"} <= site.dims.keys() for site in sites):
            raise Unsupported("mlp: gathered has no matmuls in eight bits", "use mlp: whole")
        super().check_sizes([site for site in sites if gathered or "mlp" not in site.dims])

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        of_mlps: list[Site] = []
        others: list[Site] = []
        for site in sites:
            projects = site.kind in ("linear_in", "linear_out")
            (of_mlps if projects and "mlp" in site.dims else others).append(site)
        yield from super().communication(others, element_bytes)
        for site in of_mlps if self.options.mlp == "gathered" else ():
            weights = site.dims["mlp"]
            # projections of one input with a matmul each are gathered one by one
            each = site.dims["H"] * site.dims["F"] if site.dims.get("gathered_once") else weights
            count, payload = site.count * weights // each, each * element_bytes
            for phase in ["forward", "backward"] if site.recomputed else ["forward"]:
                yield Traffic(phase, "weights of an MLP", "all_gather", count, payload)
            yield Traffic("backward", "weights of an MLP, again", "all_gather", count, payload)
            yield Traffic("backward", "gradient of an MLP's weights", "reduce_scatter", count, payload)
