"""DeepSeek-V4's attention, to compressed blocks of positions and to a window, in the layers of a causal
transformer; :mod:`spbench.impls.models.blocks.compressed_mixer` says what of DeepSeek-V4 is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from spbench.impls.models.blocks.compressed_mixer import CompressedAttention
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.softmax_options import TINY_INDEX, TINY_LATENT
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.presets import published

#: the sizes for verification, on chunks of 6, 8 and 12 positions
_TINY: Mapping[str, Any] = {
    **TINY_LATENT,
    **TINY_INDEX,
    **dict.fromkeys(("kv_lora_rank", "v_head_dim"), 6),
    **dict.fromkeys(("csa_block", "hca_block"), 2),
    **dict(zip(("window", "output_groups", "output_rank"), (5, 3, 8), strict=True)),
}


@dataclass(frozen=True)
class BlocksModel(CausalTransformerModel):
    """The options of a causal transformer with DeepSeek-V4's attention. The options of latent attention give
    its sizes: kv_lora_rank and v_head_dim are A, the features of a row; the indexer is that of layers C.

    Attributes:
        pattern: a letter for each layer, repeated, as in Megatron-LM: C (CSA), H (HCA) or W (only a window).
        csa_block, hca_block: m, the positions of a block.
        output_groups, output_rank: O and P, the groups of heads and the features that each is projected to.
    """

    sinks: bool = True
    pattern: str = "CH"
    csa_block: int = 4
    hca_block: int = 128
    output_groups: int = 8
    output_rank: int = 1024

    not_indexed: ClassVar[Sequence[str]] = ("documents", "attention_dropout", "padded_values", "lora_rank")

    def check_latent(self) -> None:
        super().check_latent()
        size, groups = self.qk_nope_head_dim + self.qk_rope_head_dim, self.output_groups
        for needed, given in (
            (f"letters C, H and W in pattern, not {self.pattern!r}", {*self.pattern} <= {*"CHW"}),
            ("sinks, and a window of at least 2 positions", self.sinks and (self.window or 0) > 1),
            (f"kv_lora_rank and v_head_dim {size}, as all", self.kv_lora_rank == self.v_head_dim == size),
            (f"output_groups that divide {self.heads} heads", self.heads % groups == 0),
            ("index_n_heads, for layers C", self.index_n_heads),
            ("blocks of at least 2 positions", min(self.csa_block, self.hca_block) > 1),
        ):
            if not given:
                raise ValueError(f"attention to blocks needs {needed}")

    @property
    def period(self) -> int:
        return math.lcm(len(self.pattern), super().period)

    @property
    def small_latent(self) -> dict[str, Any]:
        return {**super().small_latent, **_TINY, "output_groups": 1}  # which divides any heads

    def mixing(self, layer: int) -> CompressedAttention:
        letter = self.pattern[layer % len(self.pattern)]
        block = {"C": self.csa_block, "H": self.hca_block}.get(letter, 0)
        own = {"block": block, "groups": self.output_groups, "group_size": self.output_rank}
        others = {"window": None, "near": self.window, **({} if letter == "C" else {"index_n_heads": 0})}
        return CompressedAttention(**vars(super().mixing(layer)) | own | others)


PRESETS = {
    **published("deepseek_v4", BlocksModel),
    # for verification: a layer of each kind
    "blocks-tiny": BlocksModel(**{**TINY_SIZES, "layers": 3}, **_TINY, pattern="WCH"),
}
