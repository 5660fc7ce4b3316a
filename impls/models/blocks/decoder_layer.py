"""The layers of a pre-norm decoder.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, F features
of the MLP (this rank's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.bias_gelu import bias_gelu
from spbench.impls.kernels.dropout import bias_dropout_add
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.kernels.projection import mark_library
from spbench.impls.kernels.rms_norm import RMSNorm
from spbench.impls.kernels.squared_relu import squared_relu
from spbench.impls.kernels.swiglu import swiglu
from spbench.impls.kernels.swiglu_in_place import swiglu_in_place
from spbench.impls.models.blocks.host_checkpoints import checkpoints_on_host
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.blocks.tiles import WeightsOf, in_tiles
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import GroupedLinear, Linear, SeparateLinear

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh_gelu": _tanh_gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
}


class DecoderMlp(nn.Module):
    """x [B, L, H] -> [B, L, H]: W_out (f(W_1 x) * W_2 x), or W_out f(W_1 x + b_1) without a gate; the bias of
    W_out is left to what adds the result to the hidden states."""

    def __init__(self, model: DecoderModel, strategy: Strategy):
        super().__init__()
        self.activation, self.model, layers = model.activation, model, strategy.of_mlp
        self.project: Linear | GroupedLinear | SeparateLinear
        if model.biases and not model.gated_mlp:
            self.project = layers.linear_in(model.hidden, model.inner)
        elif model.separate_projections:
            widths = (model.inner,) * model.mlp_projections
            self.project = layers.separate_linear_in(model.hidden, widths, bias=model.biases)
        else:
            groups, bias = model.mlp_projections, model.biases
            self.project = layers.grouped_linear_in(model.hidden, model.inner, groups, bias=bias)
        self.out = layers.linear_out(model.inner, model.hidden)
        self.tiling, self.weights = model.mlp_tiling, WeightsOf(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiling:
            return in_tiles(self._whole, self.weights.now(), x, self.tiling)
        return self._whole(x)

    def _whole(self, x: Tensor) -> Tensor:
        return self.out.project(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        """[B, L, F]."""
        project, fuses = self.project, self.model.fuses
        if isinstance(project, GroupedLinear):
            if self.activation == "silu" and self.model.gated_mlp and fuses("bias_swiglu"):
                return swiglu(project.together(x), project.bias)
        elif self.activation == "tanh_gelu" and fuses("bias_gelu") and isinstance(project, Linear):
            bias = project.bias
            assert bias is not None  # else the MLP has one group
            return bias_gelu(project.project(x), bias, fused=True)
        x, *factors = self._opened(x)
        if self.model.swiglu == "in_place":
            return swiglu_in_place(x, factors[0])
        x = ACTIVATIONS[self.activation](x)
        return x * factors[0] if factors else x

    def _opened(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections that open the MLP, each [B, L, F]."""
        project = self.project
        if isinstance(project, SeparateLinear):
            return project(x)
        bias = project.bias
        if bias is None or not self.model.fused:
            return project(x) if isinstance(project, GroupedLinear) else (project(x),)
        # libraries leave the bias to what comes after the product
        if isinstance(project, GroupedLinear):
            return (project.together(x) + bias).unbind(-2)
        return (project.project(x) + bias,)


class AddToHidden(nn.Module):
    """hidden + dropout(x + bias), both [B, L, H], with the bias and the dropout that the model has."""

    bias: nn.Parameter | None

    def __init__(self, model: DecoderModel, strategy: Strategy):
        super().__init__()
        self.p, self.fused, self.random = model.dropout, model.fuses("bias_dropout"), strategy.random
        self.axes = strategy.position_axes
        self.bias = nn.Parameter(torch.zeros(model.hidden)) if model.biases else None

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.fused and self.p and self.bias is not None:
            mask = self.random.mask(x, self.p, self.axes)
            return bias_dropout_add(x, self.bias, hidden, mask, self.p)
        x = x if self.bias is None else x + self.bias
        return hidden + self.random.dropout(x, self.p, self.axes)


class DecoderBlock(nn.Module):
    """x [B, L, H] -> [B, L, H]: the mixer, and then the MLP, or both of the same x; or the mixer alone."""

    def __init__(self, model: DecoderModel, strategy: Strategy, layer: int):
        super().__init__()
        self.mixer_norm = make_norm(model)
        self.mixer = model.mixing(layer).build(model, strategy)
        self.mixer_end = AddToHidden(model, strategy)
        self.mlp = None
        if model.has_mlp(layer):
            self.mlp_norm = make_norm(model)
            self.mlp = DecoderMlp(model, strategy)
            self.mlp_end = AddToHidden(model, strategy)
        self.parallel = model.parallel_residual
        mark_library(self, model.library)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        mixed = self.mixer_end(self.mixer(self.mixer_norm(x), places), x)
        if self.mlp is None:
            return mixed
        return self.mlp_end(self.mlp(self.mlp_norm(x if self.parallel else mixed)), mixed)


def make_norm(model: DecoderModel) -> nn.Module:
    """The norm of the model, of hidden states [..., H]."""
    weighted, epsilon = model.weighted_norms, model.norm_epsilon
    if model.norm == "layer":
        return LayerNorm(model.hidden, epsilon, weighted=weighted)
    return RMSNorm(model.hidden, weighted=weighted, eps=epsilon, way=model.rms_norm)


class LoneDecoderLayer(nn.Module):
    """A mixer or a block with inputs of its own, for verification; recomputed in backward if the model is."""

    def __init__(self, layer: nn.Module, model: DecoderModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.layer, self.model, self.strategy, self.seq_len = layer, model, strategy, seq_len
        self.on_host = checkpoints_on_host(model.checkpoints)
        self.attended = model.attended(seq_len)
        strategy.pack(self.attended)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        places = Places(self.strategy, self.seq_len, x, self.attended)
        if self.model.recomputes_layers:
            if self.on_host is not None:
                self.on_host.begin()
            how = self.model.recomputation
            return {"y": recomputed(self.layer, self.strategy.random, x, places, on_host=self.on_host, **how)}
        return {"y": self.layer(x, places)}
