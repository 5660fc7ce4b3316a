"""DeepSeek-V4's attention, to compressed blocks of positions and to a window, in the layers of a causal
transformer; :mod:`spbench.impls.models.blocks.compressed_mixer` says what of DeepSeek-V4 is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from spbench.impls.models.blocks.compressed_mixer import CompressedAttention
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.softmax_options import TINY_INDEX
from spbench.impls.models.causal_transformer import CausalTransformerModel

#: for verification, on chunks of 6, 8 and 12 positions
_TINY: Mapping[str, Any] = {
    **TINY_INDEX,
    "head_dim": 8,
    "q_lora_rank": 14,
    "window": 5,
    "output_groups": 3,
    "output_rank": 7,
    "csa_block": 2,
    "hca_block": 2,
}


@dataclass(frozen=True)
class BlocksModel(CausalTransformerModel):
    """The options of a causal transformer with DeepSeek-V4's attention. ``window`` is W, ``head_dim`` A,
    ``q_lora_rank`` Q; the indexer's options are those of CSA.

    Attributes:
        pattern: a letter for each layer, repeated, Megatron-LM's: C (CSA), H (HCA) or W (the window alone).
        csa_block, hca_block: m of the two.
        output_groups, output_rank: O and P.
    """

    sinks: bool = True
    pattern: str = "CH"
    csa_block: int = 4
    hca_block: int = 128
    output_groups: int = 8
    output_rank: int = 1024

    def check_latent(self) -> None:
        unheeded = ("documents", "lora_rank", "kv_lora_rank", "attention_dropout", "qk_norm", "biases")
        for problem, found in (
            (f"pattern has letters C, H and W, not {self.pattern!r}", not {*self.pattern} <= {*"CHW"}),
            ("window is at least 2, and sinks are true", not self.sinks or (self.window or 0) < 2),
            ("q_lora_rank and head_dim are needed", not (self.q_lora_rank and self.head_dim)),
            (f"{', '.join(unheeded)} are left out", any(getattr(self, name) for name in unheeded)),
            ("attention is fused", self.attention == "unfused"),
            ("position is rotary", self.position != "rotary"),
            (f"output_groups divide {self.heads} heads", self.heads % self.output_groups),
            ("csa_block and hca_block are at least 2", min(self.csa_block, self.hca_block) < 2),
            ("index_n_heads and index_topk are at least 1", min(self.index_n_heads, self.index_topk) < 1),
        ):
            if found:
                raise ValueError(f"in attention to blocks {problem}")

    @property
    def period(self) -> int:
        return math.lcm(len(self.pattern), super().period)

    def shrunk(self) -> Self:
        return replace(super().shrunk(), **_TINY)

    def mixing(self, layer: int) -> CompressedAttention:
        letter = self.pattern[layer % len(self.pattern)]
        assert self.head_dim is not None
        assert self.window is not None
        turned = int(self.head_dim * self.rotary_share)
        return CompressedAttention(
            rotary_base=self.rotary_base,
            kernel=self.attention,
            sinks=True,
            near=self.window,
            kv_rank=self.head_dim,
            q_rank=self.q_lora_rank,
            plain_size=self.head_dim - turned,
            turned_size=turned,
            block={"C": self.csa_block, "H": self.hca_block}.get(letter, 0),
            groups=self.output_groups,
            group_size=self.output_rank,
            **self.index | ({} if letter == "C" else {"index_heads": 0}),
        )

    def variants(self) -> list[Mapping[str, Any]]:
        return []


PRESETS = {
    # for verification: each kind of layer once
    "blocks-tiny": BlocksModel(**{**TINY_SIZES, "layers": 3}, **_TINY, pattern="WCH", rotary_share=0.5),
}
