"""TransNormerLLM (Qin et al., arXiv 2307.14995) by its released code, the model that LASP's paper trains.

One matmul projects a layer's input to queries, keys, values and a gate. Queries and keys go through SiLU, and
in the first layer through LRPE. Linear attention has a decay for each head; a norm over all features follows,
then the gate multiplies the output. The MLP is a gated linear unit without an activation.

As in the released code, the gate has no activation, and norms are "simple", without weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.linear_mixer import LinearAttention


def slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head (arXiv 2108.12409): 2^(-8/n), 2^(-16/n), ... for n heads, where n is a power
    of two; else the slopes for the power below n, then every other slope for the power above n."""
    below = 2 ** int(math.log2(heads))
    if below < heads:
        return slopes(below) + slopes(2 * below)[0::2][: heads - below]
    return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]


def decay_rates(heads: int, layer: int, layers: int) -> list[float]:
    """The decay rate of each head of a layer: the head's slope in the first layer, nearly 0 in the last."""
    share = 1 - layer / max(1, layers - 1) + 1e-5  # the released code's bound away from zero
    return [share * slope for slope in slopes(heads)]


@dataclass(frozen=True)
class TransNormerModel(DecoderModel):
    """The options of a TransNormerLLM, which are a decoder's with another ``attention_norm``."""

    attention_norm: str = "hidden"

    activation: ClassVar[str] = "none"
    weighted_norms: ClassVar[bool] = False

    def mixing(self, layer: int) -> LinearAttention:
        decay = tuple(decay_rates(self.heads, layer, self.layers))
        return LinearAttention("silu", decay, gated=True, lrpe=layer == 0)

    def variants(self) -> list[Mapping[str, Any]]:
        # strategies that split heads run only the variants with attention_norm "head"
        by_head = {"attention_norm": "head"}
        return [*super().variants(), by_head, {"checkpointing": True} | by_head]


PRESETS = {
    # sizes that give the parameters of LASP's 0.4B, 1B and 7B; the inner width is 8/3 of hidden, customary
    # for gated linear units, rounded up to a multiple of 256
    "tnl-0.4b": TransNormerModel(layers=24, hidden=1024, heads=8, inner=2816),
    "tnl-1b": TransNormerModel(layers=16, hidden=2048, heads=16, inner=5632),
    "tnl-7b": TransNormerModel(layers=30, hidden=4096, heads=32, inner=11264),
    # for training on a few CPUs
    "tnl-mini": TransNormerModel(layers=2, hidden=64, heads=4, inner=176, vocabulary=1024),
    "tnl-tiny": TransNormerModel(**TINY_SIZES),
}
