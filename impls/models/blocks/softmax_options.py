"""The options of softmax attention as what mixes the tokens in a layer of a causal language model, with the
closed forms of its parameters and of what it asks of a strategy.

Shape letters: B batch, L sequence, H hidden, Z heads, G heads of keys and values, A head size, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from spbench.impls.attended import Attended
from spbench.impls.layout import SiteKind
from spbench.impls.models.blocks.adapter_options import CLOSING, QKV, Adaptable
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site

#: kernels that take and return [B, L, Z, A]; they are alike but for their rates on a card
FLASH_KERNELS = (
    "flash",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "triton",
)
#: those that make no scores
FUSED_KERNELS = (*FLASH_KERNELS, "cudnn")
KERNELS = (*FUSED_KERNELS, "unfused")


@dataclass(frozen=True)
class SoftmaxOptions(Adaptable):
    """The options of a layer of causal softmax attention, and what they ask of a strategy.

    Attributes:
        rotary_base: of RoPE's angles; None: no RoPE.
        rotary_share: of each head's features, the first ones, that RoPE turns.
        bias: whether the projection to queries, keys and values has one.
        dropout: of probabilities.
        kernel: "flash" or one of its kinds, by whose rates it is timed, "cudnn" (flash attention too, which
            takes positions before the batch, so that libraries that lay out hidden states so make no second
            copy of its output), or "unfused", which makes all scores.
        window: positions that a position attends to at most, with its own; None: all (:class:`Attended`).
        sinks: each head has a learned logit that joins the softmax's denominator
            (:mod:`spbench.impls.kernels.sinks`).
        gated: each head's output is multiplied by the sigmoid of a gate, which the input is projected to
            (Qwen3-Next, whose code makes one product of queries and gates).
    """

    rotary_base: float | None = 10_000.0
    bias: bool = False
    dropout: float = 0.0
    kernel: str = "flash"
    rotary_share: float = 1.0
    gated: bool = False
    window: int | None = None
    sinks: bool = False

    adapted: ClassVar[Sequence[str]] = (*QKV, CLOSING)

    def __post_init__(self) -> None:
        check_choices(self, {"kernel": KERNELS})
        if not 0 < self.rotary_share <= 1:
            raise ValueError(f"rotary_share is above 0 and at most 1, not {self.rotary_share}")

    def by_groups(self, model: DecoderOptions) -> bool:
        """Whether the projection's rows lie group by group of heads (:class:`GroupedQueryLinear`)."""
        return self.bias or model.grouped

    @property
    def needs_all_positions(self) -> bool:
        """Whether only a rank that has all positions can compute it."""
        return self.dropout > 0 or self.kernel == "unfused"

    def attended(self, packed: Attended, seq_len: int) -> Attended:
        """What a position attends to in this layer of a sequence that is packed so."""
        return packed.in_layer(self.window, seq_len)

    def heeded(self, packed: Attended, seq_len: int) -> dict[str, int]:
        """The dims of a site that say what this layer heeds beside the causal mask."""
        return self.attended(packed, seq_len).dims | ({"sinks": 1} if self.sinks else {})

    def width(self, model: DecoderOptions) -> int:
        """Features between the projections that open and close the layer."""
        return model.attention_width

    def gathers_once(self, model: DecoderOptions) -> bool:
        """Whether the input is one tensor for several products."""
        return model.separate_projections

    def norm_weights(self, model: DecoderOptions) -> int:
        """How many weights and biases the norms of queries and keys have, of a head each."""
        heads = model.heads + (model.kv_heads or model.heads) if model.qk_norm_over == "all" else 2
        return heads * (2 if model.norm == "layer" else 1) if model.qk_norm else 0

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        """Counts of the layer's parameters: those that can be ``split`` over features, of these the
        ``key_value`` ones that grouped heads share, and the ``whole`` ones that every rank holds."""
        columns = model.hidden + (1 if self.bias else 0)
        key_value = 2 * (model.kv_heads or model.heads) * model.head_size * columns
        return {
            "split": model.attention_width * (columns + (1 + self.gated) * model.hidden)
            + key_value
            + self.sinks * model.heads,
            "key_value": key_value if model.grouped else 0,
            "whole": model.head_size * self.norm_weights(model),
        }

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        """What the layer asks of a strategy for one batch; ``again``: the layer is recomputed."""
        heads, sites = {"Z": model.heads, "A": model.head_size}, []
        if model.separate_projections:
            heads["G"] = model.kv_heads or model.heads
            sites.append(Site("separate_linear_in", 1, heads, again))
        elif self.by_groups(model):
            heads["G"] = model.kv_heads or model.heads
            bias = {"bias": 1} if self.bias else {}
            sites.append(Site("grouped_query_linear_in", 1, heads | {"H": model.hidden} | bias, again))
        if model.qk_norm and model.qk_norm_over == "all":
            sites.append(Site("feature_norm", 1, {"B": batch, "L": seq_len, **heads}, again))
        elif model.qk_norm:
            sites.append(Site("shared_by_heads", self.norm_weights(model), {"A": model.head_size}, again))
        if self.gated:
            gate = {"B": batch, "L": seq_len, "H": model.hidden, "F": model.attention_width}
            sites.append(Site("linear_in", 1, gate, again))
        return [*sites, self.meeting(model, batch, seq_len, heads, again)]

    def meeting(
        self, model: DecoderOptions, batch: int, seq_len: int, heads: Mapping[str, int], again: bool
    ) -> Site:
        """Where positions meet, with these dims of its heads."""
        kind: SiteKind = "whole_attention" if self.needs_all_positions else "causal_attention"
        kept = {"kept": 1} if model.keeps_operators else {}
        again = again or model.recomputes("core_attn")
        heeded = self.heeded(model.attended(seq_len), seq_len)
        return Site(kind, 1, {"B": batch, "L": seq_len, **heads, **kept, **heeded}, again)
