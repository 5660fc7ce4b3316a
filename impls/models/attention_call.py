"""One call of causal softmax attention on queries, keys and values that are given, as benchmarks of attention
make it: no projections, no norm, no weights.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), Z heads, G heads of
keys and values, A head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.models.blocks.packing import PackedSequences
from spbench.impls.models.blocks.softmax_mixer import FUSED_KERNELS
from spbench.impls.models.model import Model, ModelPart
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Strategy, Unsupported


@dataclass(frozen=True)
class AttentionCallModel(PackedSequences, Model):
    """The options of an attention call.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values, which divide ``heads``; None: as many.
        head_size: features of a head.
        attention: the kernel, by whose rates on a card it is timed.
        documents, documents_seed: what a sequence is packed of; see :class:`PackedSequences`.
    """

    heads: int = 32
    kv_heads: int | None = None
    head_size: int = 128
    attention: str = "flash"
    documents: str | Sequence[int] = ()
    documents_seed: int = 0

    sequence_dims: ClassVar[Mapping[str, int]] = {"q": 1, "k": 1, "v": 1}
    has_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, {"attention": FUSED_KERNELS})
        self.check_documents()
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} are not divisible by kv_heads {self.kv_heads}")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def attention_kernel(self) -> str:
        return self.attention

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        _one_stage_only(stage)
        return AttentionCall(strategy, self.attended(seq_len))

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {
            name: torch.randn(batch, seq_len, heads, self.head_size, generator=generator)
            for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups))
        }

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        _one_stage_only(stage)
        heads = {"Z": self.heads, "G": self.groups, "A": self.head_size}
        return [
            Site("given_heads", 1, {"Z": self.heads}),
            Site("causal_attention", 1, {"B": batch, "L": seq_len} | heads | self.heeded(seq_len)),
            Site("parameters", 1, {"elements": 0}),
        ]

    def parts(self) -> Mapping[str, ModelPart]:
        return {"model": ModelPart(self.build, self.inputs, self.sequence_dims, {"o": 1})}


def _one_stage_only(stage: Stage) -> None:
    if stage.count > 1:
        raise Unsupported("one attention call cannot be split over pipeline stages", "use pp 1")


class AttentionCall(nn.Module):
    """q [B, L, Z, A], k, v [B, L, G, A] -> ``o`` [B, L, Z, A]."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, strategy: Strategy, attended: Attended):
        super().__init__()
        self.strategy, self.attended = strategy, attended
        strategy.pack(attended)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
        attended = [] if self.attended.plain else [self.attended]
        return {"o": self.strategy.causal_attention(q, k, v, *attended).transpose(1, 2)}


PRESETS = {
    # the heads of Llama 3 8B (arXiv 2407.21783, table 3)
    "attention-call": AttentionCallModel(kv_heads=8),
    # for verification: 12 heads divide by 1, 2, 3 and 4; 4 of keys and values are also held by several ranks
    "attention-call-tiny": AttentionCallModel(heads=12, kv_heads=4, head_size=4),
}
