"""A plain linear transformer (Katharopoulos et al., arXiv 2006.16236), the second model of LASP's paper.

elu(x) + 1 on queries and keys, no decay, no gate, an MLP with GELU. The original divides the output by a
sum over keys. The kernels of LASP's authors have no such denominator, and TransNormer (arXiv 2210.10340)
argues for a norm in its place; so here the output of each head is normalised. The paper gives no sizes
beside 0.4B parameters: these are those of its TransNormerLLM of 0.4B, with the customary inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.linear_mixer import LinearAttention


@dataclass(frozen=True)
class LinearTransformerModel(DecoderModel):
    """The options of a plain linear transformer."""

    gated_mlp: ClassVar[bool] = False
    activation: ClassVar[str] = "gelu"

    def mixing(self, layer: int) -> LinearAttention:
        return LinearAttention("elu_plus_one")


PRESETS = {
    "linear-transformer-0.4b": LinearTransformerModel(layers=24, hidden=1024, heads=8, inner=4096),
    "linear-transformer-mini": LinearTransformerModel(
        layers=2, hidden=64, heads=4, inner=256, vocabulary=1024
    ),
    "linear-transformer-tiny": LinearTransformerModel(**TINY_SIZES),
}
