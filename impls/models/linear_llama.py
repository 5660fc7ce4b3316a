"""Linear-Llama3, the model of LASP-2's paper (arXiv 2502.07563): Llama 3 with linear attention for softmax.

The linear attention is the basic one of the authors' script: no decay, no gate, SiLU on queries and keys, and
a norm of each head's output. Hybrids keep softmax attention with RoPE in some layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention


@dataclass(frozen=True)
class LinearLlamaModel(DecoderModel):
    """The options of a Llama with linear attention.

    Attributes:
        vocabulary: rows of the word embedding before padding; Llama 3's by default.
        softmax_every: n, where every n-th layer has softmax attention (4: the paper's quarter hybrid); None:
            no layer has.
        output_gate: whether a projection of the layer's input multiplies linear attention's output, as in the
            authors' code (o_gate_proj), but not in the paper.
    """

    vocabulary: int = 128256
    softmax_every: int | None = None
    output_gate: bool = False

    def mixing(self, layer: int) -> LinearAttention | SoftmaxAttention:
        if self.softmax_every and (layer + 1) % self.softmax_every == 0:
            return SoftmaxAttention(rotary_base=500_000.0)  # Llama 3's
        return LinearAttention("silu", gated=self.output_gate)

    @property
    def period(self) -> int:
        return self.softmax_every or 1

    def variants(self) -> list[Mapping[str, Any]]:
        # a hybrid has no other sites than its two kinds of layers, which other presets verify
        return [{"checkpointing": True}] if self.softmax_every else super().variants()


PRESETS = {
    # the authors' script for 1B (OpenSparseLLMs/Linear-MoE, run_pretrain_mcore_llama.sh) has inner width
    # 8192, 32 heads and an untied head: 1.07e9 parameters are in the layers, which makes the "1B", and 0.53e9
    # in embedding and head. The script also asks for groups of heads, but the authors' layer
    # (linear_attention.py) gives each head its own keys and values. Its gate is an option: the paper has none
    "linear-llama3-1b": LinearLlamaModel(layers=16, hidden=2048, heads=32, inner=8192),
    "linear-llama3-tiny": LinearLlamaModel(**TINY_SIZES),
    "linear-llama3-tiny-hybrid": LinearLlamaModel(**TINY_SIZES, softmax_every=2),
}
