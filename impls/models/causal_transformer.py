"""A causal transformer with softmax attention, as Llama (arXiv 2302.13971): RoPE, RMS norms, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.mixers import SoftmaxAttention


@dataclass(frozen=True)
class CausalTransformerModel(DecoderModel):
    """The options of a causal transformer with softmax attention in every layer."""

    def mixing(self, layer: int) -> SoftmaxAttention:
        return SoftmaxAttention()


PRESETS = {
    # the sizes of tnl-1b
    "causal-transformer-1b": CausalTransformerModel(layers=16, hidden=2048, heads=16, inner=5632),
    "causal-transformer-tiny": CausalTransformerModel(**TINY_SIZES),
}
