"""The layers of a decoder.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, F features
of the MLP (this rank's).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spbench.impls.kernels.dropout import bias_dropout_add
from spbench.impls.kernels.fp8_projection import mark_recipe
from spbench.impls.kernels.packed_weights import mark_packed, pack_weights
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE, mark_library
from spbench.impls.models.blocks.adapters import beside_adapters, freeze
from spbench.impls.models.blocks.architecture import Architecture
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.blocks.host_checkpoints import checkpoints_on_host
from spbench.impls.models.blocks.norms import norm_of
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recomputation import recomputed, remade
from spbench.impls.strategies.base import Strategy


class AddToHidden(nn.Module):
    """The module that returns hidden + dropout(x + bias) [B, L, H] with the model's dropout. There is a bias
    if ``biased`` and the model's projections have biases."""

    bias: nn.Parameter | None

    def __init__(self, model: Architecture, strategy: Strategy, *, biased: bool = True):
        super().__init__()
        self.p, self.fused, self.random = model.dropout, model.fuses("bias_dropout"), strategy.random
        self.axes = strategy.position_axes
        self.bias = nn.Parameter(torch.zeros(model.hidden)) if model.biases and biased else None

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.fused and self.p and self.bias is not None:
            mask = self.random.mask(x, self.p, self.axes)
            return bias_dropout_add(x, self.bias, hidden, mask, self.p)
        x = x if self.bias is None else x + self.bias
        return hidden + self.random.dropout(x, self.p, self.axes)


class DecoderBlock(nn.Module):
    """A layer, x [B, L, H] -> [B, L, H]: a mixer, then a feed-forward block if the layer has one (or both of
    the same x). Norms stand before each of the two, behind each, on both sides, or one before both."""

    def __init__(self, model: Architecture, strategy: Strategy, layer: int):
        super().__init__()
        before, behind = model.norms != "behind", model.norms in ("behind", "around")
        # an absent module is None, because an identity would cost the host a call
        self.mixer_norm = make_norm(model) if before else None
        self.mixer = model.mixing(layer).build(model, strategy)
        self.mixer_post_norm = make_norm(model) if behind else None
        self.mixer_end = AddToHidden(model, strategy)
        self.mlp = None
        if (feeding := model.feeding(layer)) is not None:
            self.mlp_norm = make_norm(model) if model.norms in ("before", "around") else None
            self.mlp = feeding.build(model, strategy)
            self.mlp_post_norm = make_norm(model) if behind else None
            self.mlp_end = AddToHidden(model, strategy, biased=feeding.closing_bias)
        self.parallel, self.model, self.random = model.parallel_residual, model, strategy.random
        self.has_experts = isinstance(self.mlp, MixtureModule)
        if model.packs:
            mlp = self.mlp.shared if isinstance(self.mlp, MixtureModule) else self.mlp
            pack_weights(beside_adapters(self.mixer, mlp), model.frozen_bits)
        mark_library(self, model.library)
        mark_recipe(self, model.fp8_recipe)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        mark_recipe(self, self.model.fp8_recipe)
        if self.model.packs:
            mark_packed(self)
        normal = _normed(self.mixer_norm, x)
        shared = normal if self.model.norms == "shared" else x
        mixed = _normed(self.mixer_post_norm, self.mixer(normal, places))
        del normal
        mixed = self.mixer_end(mixed, x)
        if self.mlp is None:
            return mixed
        fed = self._fed(shared if self.parallel else mixed)
        return self.mlp_end(_normed(self.mlp_post_norm, fed), mixed)

    def _fed(self, x: Tensor) -> Tensor:
        """The feed-forward block's result [B, L, H] of hidden states x [B, L, H], which the block's norm
        normalises first."""
        model, mlp = self.model, self.mlp
        assert mlp is not None
        # TransformerEngine's projection that opens an MLP includes the norm; experts have a separate norm
        included = model.library == TRANSFORMER_ENGINE and not self.has_experts
        if model.recomputes("mlp") and not self.has_experts:
            if included:
                return recomputed(lambda x: mlp(_normed(self.mlp_norm, x)), self.random, x)
            return recomputed(mlp, self.random, _normed(self.mlp_norm, x))
        normal = _normed(self.mlp_norm, x)
        if model.recomputes("layernorm") and not included and (norm := self.mlp_norm) is not None:
            detached = x.detach()
            with remade([normal], lambda: [norm(detached)]):
                fed: Tensor = mlp(normal)
                return fed
        return mlp(normal)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """norm(x), of the shape of x, or x itself without a norm."""
    if norm is None:
        return x
    y: Tensor = norm(x)
    return y


def make_norm(model: Architecture) -> nn.Module:
    """A new norm of the model's kind for hidden states [..., H]."""
    return norm_of(model, model.hidden, weighted=model.weighted_norms)


class LoneDecoderLayer(nn.Module):
    """A mixer or a whole layer that takes its own inputs, for verification; backward recomputes the layer as
    the model's options say."""

    def __init__(self, layer: nn.Module, model: Architecture, strategy: Strategy, seq_len: int):
        super().__init__()
        self.layer, self.model, self.strategy, self.seq_len = layer, model, strategy, seq_len
        self.on_host = checkpoints_on_host(model.checkpoints)
        self.attended = model.attended(seq_len)
        self.scaling = model.delayed_scaling(layer, strategy)
        freeze(layer, model)
        strategy.pack(self.attended)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        mark_recipe(self, self.model.fp8_recipe)
        if self.scaling is not None:
            x = self.scaling.entering(x)
        places = Places(self.strategy, self.seq_len, x, self.attended)
        if self.model.recomputes_layers:
            if self.on_host is not None:
                self.on_host.begin()
            how = self.model.recomputation
            y = recomputed(self.layer, self.strategy.random, x, places, on_host=self.on_host, **how)
        else:
            y = self.layer(x, places)
        if self.scaling is not None:
            self.scaling.update(forward=True)
        return {"y": y}
