"""A causal transformer with softmax attention, as Llama (arXiv 2302.13971): RoPE, RMS norms, SwiGLU.

With ``kv_heads`` it has the grouped queries of Llama 3 (arXiv 2407.21783), with ``qk_norm`` too those of
Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import dataclass

from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.mixers import SoftmaxAttention


@dataclass(frozen=True)
class CausalTransformerModel(DecoderModel):
    """The options of a causal transformer with softmax attention in every layer.

    Attributes:
        rotary_base: of RoPE's angles.
    """

    rotary_base: float = 10_000.0

    def mixing(self, layer: int) -> SoftmaxAttention:
        return SoftmaxAttention(self.rotary_base)


PRESETS = {
    # the sizes of tnl-1b
    "causal-transformer-1b": CausalTransformerModel(layers=16, hidden=2048, heads=16, inner=5632),
    # arXiv 2407.21783, table 3; 8.03e9 parameters
    "llama3-8b": CausalTransformerModel(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        inner=14336,
        vocabulary=128256,
        rotary_base=500_000.0,
        norm_epsilon=1e-5,
    ),
    "causal-transformer-tiny": CausalTransformerModel(**TINY_SIZES),
    # 4 heads of keys and values are split over 2 or 4 ranks, and held by several of 12
    "causal-transformer-tiny-gqa": CausalTransformerModel(**TINY_SIZES, kv_heads=4, qk_norm=True),
}
