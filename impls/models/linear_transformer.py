"""A plain linear transformer (Katharopoulos et al., arXiv 2006.16236), the second model of LASP's paper.

The model has elu(x) + 1 on queries and keys, no decay, no gate, and an MLP with GELU. The original divides
the output by a sum over keys. This model normalises the output of each head instead, because the kernels of
LASP's authors have no denominator, and TransNormer (arXiv 2210.10340) argues for a norm. The paper says only
0.4B parameters: the sizes are of the paper's TransNormerLLM of 0.4B, with the customary inner width 4 H.
"""

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
