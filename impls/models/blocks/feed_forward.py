"""The feed-forward block of a decoder's layer, by default an MLP.

A kind of block is a class derived from :class:`FeedForward`; :meth:`DecoderModel.feeding` says which one a
layer has.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, F features
of the MLP (this rank's).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels import activations
from spbench.impls.models.blocks.adapter_options import MLP_CLOSING
from spbench.impls.models.blocks.adapters import ClosingAdapter, OpeningAdapters
from spbench.impls.models.blocks.architecture import Architecture, FeedForward
from spbench.impls.models.blocks.tiles import WeightsOf, in_tiles
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import GroupedLinear, Linear, SeparateLinear


@dataclass(frozen=True)
class Mlp(FeedForward):
    """The kind of feed-forward block that is an MLP, with a gate or without; see :class:`MlpModule`."""

    def build(self, model: Architecture, strategy: Strategy) -> nn.Module:
        return MlpModule(model, strategy)

    def sites(self, model: Architecture, batch: int, seq_len: int, again: bool, spared: bool) -> list[Site]:
        again, spared = again or model.recomputes("mlp"), spared and not model.recomputes("mlp")
        return mlp_sites(model, model.inner, batch, seq_len, again, spared=spared)

    def parameters(self, model: Architecture) -> dict[str, int]:
        split = (model.mlp_projections + 1) * model.hidden * model.inner
        if model.biases:
            split += model.mlp_projections * model.inner
        return {"split": split, "mlp": split, "whole": model.hidden * model.biases}


def mlp_sites(
    model: Architecture,
    inner: int,
    batch: int,
    seq_len: int,
    again: bool,
    *,
    spared: bool,
    once: bool = False,
) -> list[Site]:
    """The sites (calls of the strategy) of an MLP with ``inner`` features; ``once``: backward has a gathered
    input whole. For ``again`` and ``spared`` see :meth:`FeedForward.sites`."""
    hidden = {"B": batch, "L": seq_len, "H": model.hidden, "F": inner} | model.mlp_tiling.dims
    weights, bias = model.hidden * inner, {"bias": 1} if model.biases else {}
    gathered = {"gathered_once": 1} if once or model.separate_projections else {}
    kept = {"kept": 1} if model.keeps_operators else {}
    opens, closes = ({"mlp": n * weights, **bias} for n in (model.mlp_projections, 1))
    return [
        Site("linear_in", 1, hidden | gathered | opens | model.gathered_dims, again),
        Site("linear_out", 1, hidden | kept | closes, again and not spared),
    ]


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _unchanged(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _unchanged,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh_gelu": _tanh_gelu,
    "relu": F.relu,
    "squared_relu": activations.squared_relu,
    "clamped_silu": activations.clamped_silu,
}
#: the function of the second projection of a gated MLP, by the activation of the first
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {"clamped_silu": activations.clamped_plus_one}


class MlpModule(nn.Module):
    """The MLP's module, x [B, L, H] -> [B, L, H]: W_out (f(W_1 x) * W_2 x), or W_out f(W_1 x + b_1) without a
    gate. :class:`AddToHidden` adds the bias of W_out.

    Args:
        inner: the inner features of all ranks; None: the model's ``inner``.
    """

    def __init__(self, model: Architecture, strategy: Strategy, inner: int | None = None):
        super().__init__()
        inner = model.inner if inner is None else inner
        self.activation, self.model, layers = model.activation, model, strategy.of_mlp
        self.project: Linear | GroupedLinear | SeparateLinear
        if model.biases and not model.gated_mlp:
            self.project = layers.linear_in(model.hidden, inner)
        elif model.separate_projections:
            widths = (inner,) * model.mlp_projections
            self.project = layers.separate_linear_in(model.hidden, widths, bias=model.biases)
        else:
            groups, bias = model.mlp_projections, model.biases
            self.project = layers.grouped_linear_in(model.hidden, inner, groups, bias=bias)
        self.out = layers.linear_out(inner, model.hidden)
        self.opening: OpeningAdapters | None = None
        self.closing: ClosingAdapter | None = None
        names = model.opening_names
        if model.adapts(names):
            self.opening = OpeningAdapters(
                model,
                strategy,
                model.hidden,
                names,
                lambda rank: layers.grouped_linear_in(rank, inner, len(names)),
                lambda rank, place: layers.separate_linear_in(rank, (inner,)),
            )
        if model.adapts([MLP_CLOSING]):
            self.closing = ClosingAdapter(model, strategy, layers, inner, model.hidden)
        self.tiling, self.weights = model.mlp_tiling, WeightsOf(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiling:
            return in_tiles(self._whole, self.weights.now(), x, self.tiling)
        return self._whole(x)

    def _whole(self, x: Tensor) -> Tensor:
        return self.closed(self.opened(x))

    def closed(self, x: Tensor) -> Tensor:
        """The last projection [B, L, H] of features x [B, L, F]."""
        y = self.out.project(x)
        return y if self.closing is None else self.closing(x, y)

    def opened(self, x: Tensor) -> Tensor:
        """The activated features [B, L, F] of x [B, L, H], which the last projection takes."""
        project, fuses = self.project, self.model.fuses
        if isinstance(project, GroupedLinear):
            if self.activation == "silu" and self.model.gated_mlp and fuses("bias_swiglu"):
                y = project.together(x)
                return activations.swiglu(
                    y if self.opening is None else y + self.opening.together(x), project.bias
                )
        elif self.activation == "tanh_gelu" and fuses("bias_gelu") and isinstance(project, Linear):
            bias = project.bias
            assert bias is not None  # an MLP without biases has a GroupedLinear
            y = project.project(x)
            if self.opening is not None:
                y = y + self.opening.together(x).squeeze(-2)
            return activations.bias_gelu(y, bias, fused=True)
        opened = self._projected(x)
        x, *factors = opened if self.opening is None else self.opening(x, opened)
        if self.model.swiglu == "in_place":
            return activations.swiglu_in_place(x, factors[0])
        if self.activation == "silu" and factors and fuses("bias_swiglu"):
            return activations.silu_times(x, factors[0])
        x = ACTIVATIONS[self.activation](x)
        return x * FACTORS.get(self.activation, _unchanged)(factors[0]) if factors else x

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """The opening projections of x [B, L, H], biases included, each [B, L, F]."""
        project = self.project
        if isinstance(project, SeparateLinear):
            return project(x)
        bias = project.bias
        if bias is None or not self.model.fused:
            return project(x) if isinstance(project, GroupedLinear) else (project(x),)
        # libraries add the bias in an operator after the matmul
        if isinstance(project, GroupedLinear):
            return (project.together(x) + bias).unbind(-2)
        return (project.project(x) + bias,)
