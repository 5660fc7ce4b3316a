"""Hybrids: causal transformers in some of whose layers a recurrence mixes the tokens instead of softmax
attention.

Which layer has what is a pattern of letters that repeats: three layers of Gated DeltaNet to one of softmax
attention as Qwen3-Next, seven of lightning attention to one as MiniMax-01 (arXiv 2501.08313), Mamba-2 as
Nemotron-H (arXiv 2504.03624).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.gated_deltanet import GatedDeltaNet
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.mamba2 import Mamba2
from spbench.impls.models.blocks.recurrent_mixer import WAYS, RecurrentLayer
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.tnl import decay_rates
from spbench.impls.options import check_choices

RECURRENCES: Mapping[str, Callable[..., RecurrentLayer]] = {"G": GatedDeltaNet, "M": Mamba2}
#: letters of a pattern, and what they stand for
LETTERS = {"S": "softmax attention", "L": "lightning attention", "G": "Gated DeltaNet", "M": "Mamba-2"}


@dataclass(frozen=True)
class HybridModel(CausalTransformerModel):
    """The options of a hybrid.

    Attributes:
        pattern: a letter of :data:`LETTERS` for each layer, again and again.
        state_heads: Z of layers of Gated DeltaNet or Mamba-2.
        state_key_heads: G of these.
        key_size: D of these.
        value_size: A of these.
        convolution: W of these.
        recurrence: how these are computed, one of :data:`WAYS`.
    """

    pattern: str = "S"
    state_heads: int = 32
    state_key_heads: int = 16
    key_size: int = 128
    value_size: int = 128
    convolution: int = 4
    recurrence: str = "chunked"

    plain_options: ClassVar[Mapping[str, Any]] = {
        **CausalTransformerModel.plain_options,
        "recurrence": "sequential",
    }

    def __post_init__(self) -> None:
        check_choices(self, {"recurrence": WAYS})
        if not self.pattern or set(self.pattern) - set(LETTERS):
            known = ", ".join(f"{letter} ({what})" for letter, what in LETTERS.items())
            raise ValueError(f"pattern has letters of {known}, not {self.pattern!r}")
        super().__post_init__()

    def variants(self) -> list[Mapping[str, Any]]:
        # 3 heads cannot be split over 2 or 4
        three = {"state_heads": 3, "state_key_heads": 1}
        return [{"checkpointing": True}, {"heads": 3, "kv_heads": None} | three]

    def mixing(self, layer: int) -> LinearAttention | SoftmaxAttention | RecurrentLayer:
        letter = self.pattern[layer % len(self.pattern)]
        if letter in RECURRENCES:
            return RECURRENCES[letter](
                self.state_heads,
                self.state_key_heads,
                self.key_size,
                self.value_size,
                self.convolution,
                self.recurrence,
            )
        if letter == "L":
            return LinearAttention("silu", tuple(decay_rates(self.heads, layer, self.layers)), gated=True)
        return super().mixing(layer)


_TINY: Mapping[str, Any] = {
    **TINY_SIZES,
    "state_heads": 12,
    "key_size": 4,
    "value_size": 8,
}

PRESETS = {
    "gated-deltanet-tiny-hybrid": HybridModel(
        **_TINY, pattern="GS", state_key_heads=4, kv_heads=4, qk_norm=True, rotary_share=0.5
    ),
    "gated-deltanet-tiny": HybridModel(**_TINY, pattern="G", state_key_heads=12),
    "mamba2-tiny": HybridModel(**_TINY, pattern="M", state_key_heads=4),
}
