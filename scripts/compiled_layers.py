"""The steps of Llama-3-8B that compiled_step.py measures: of the project's layers, and of compiled layers.

Dynamo refuses the project's layers, because a property of them uses ``super()``. Therefore this module has a
layer in torch's functions with the same weights.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from spbench.impls.kernels.rotary import rotated
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy

MODEL = "llama3-8b"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "eager": {"rms_norm": "fused"},
    "fused": {"rms_norm": "fused", "fusions": ["swiglu", "rope"]},
    "compiled": {"rms_norm": "fused"},
    "plain_norm": {"rms_norm": "plain"},
}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "full": {"recompute": "full", "recompute_early_stop": True},
}


def options_of(variant: str, recompute: str) -> dict[str, Any]:
    return {"separate_projections": True, **VARIANTS[variant], **RECOMPUTE[recompute]}


class PlainLayer(nn.Module):
    """A layer of Llama in torch's functions, with the weights of ``block``, a layer of the project."""

    def __init__(self, block: Any):
        super().__init__()
        self.head_size, self.epsilon = block.model.head_size, block.mixer_norm.eps
        self.norm, self.out = block.mixer_norm.weight, block.mixer.out.weight
        self.q, self.k, self.v = block.mixer.project.weights
        self.mlp_norm, self.down = block.mlp_norm.weight, block.mlp.out.weight
        self.gate, self.up = block.mlp.project.weights

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = F.rms_norm(x, x.shape[-1:], self.norm, self.epsilon)
        q, k, v = (
            F.linear(n, w).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = x + F.linear(o.transpose(1, 2).flatten(2), self.out)
        m = F.rms_norm(y, y.shape[-1:], self.mlp_norm, self.epsilon)
        return y + F.linear(F.silu(F.linear(m, self.gate)) * F.linear(m, self.up), self.down)


class CompiledLayer(nn.Module):
    """A compiled :class:`PlainLayer`, which replaces a decoder's layer; ``again``: the layer is recomputed,
    by a checkpoint that is compiled too."""

    def __init__(self, block: Any, backend: str, *, again: bool):
        super().__init__()
        layer: nn.Module = PlainLayer(block)
        self.layer = checkpoint_wrapper(layer, preserve_rng_state=False) if again else layer
        self.size, self.base = block.model.head_size, block.mixer.kind.rotary_base
        self.layer.compile(backend=backend, fullgraph=True)

    def forward(self, x: Tensor, places: Any) -> Tensor:
        y: Tensor = self.layer(x, *places.rotary(self.size, self.base))
        return y


class Step:
    """The forward and backward of one variant's module, whose random weights come from a fixed seed."""

    def __init__(self, variant: str, recompute: str, layers: int, asked: argparse.Namespace):
        compiled, again = variant == "compiled", recompute == "full"
        device, seq_len = asked.device, asked.seq_len
        options = {**asked.sizes, **options_of(variant, "none" if compiled else recompute), "layers": layers}
        model = model_preset(MODEL, options)
        with torch.device(device):
            self.module = model.build(Strategy(), seq_len).to(torch.bfloat16)
        #: the weights in the order of the model's module before its layers are compiled
        self.weights = list(self.module.parameters())
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for weight in self.weights:
                weight.grad = torch.zeros_like(weight)
                if weight.ndim > 1:
                    weight.normal_(0, 0.02, generator=generator)
        blocks: Any = self.module.blocks
        if compiled:
            for name in list(blocks):
                blocks[name] = CompiledLayer(blocks[name], asked.backend, again=again)
        inputs = model.inputs(1, seq_len, torch.Generator().manual_seed(0))
        self.inputs = {name: x.to(device) for name, x in inputs.items()}

    def forward(self) -> Tensor:
        loss: Tensor = self.module(self.inputs)["loss"]
        return loss

    def __call__(self) -> Tensor:
        loss = self.forward()
        loss.backward()
        return loss.detach()
