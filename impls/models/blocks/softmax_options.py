"""The options of softmax attention as a mixer of causal language models, with closed forms of its parameters
and sites; the options of latent attention and of multi-token prediction, named as in DeepSeek's config.json.

Shape letters: B batch, L sequence, H hidden, Z heads, G heads of keys and values, A head size, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from spbench.impls.attended import Attended
from spbench.impls.kernels.chosen_attention import WAYS
from spbench.impls.layout import SiteKind
from spbench.impls.models.blocks.adapter_options import CLOSING, QKV
from spbench.impls.models.blocks.architecture import Mixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site

#: kernels that take and return [B, L, Z, A], and differ only in their rates on a card
FLASH_KERNELS = (
    "flash",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "efficient_attention_with_mask",
    "triton",
)
#: kernels that make no tensor of all scores
FUSED_KERNELS = (*FLASH_KERNELS, "cudnn")
KERNELS = (*FUSED_KERNELS, "unfused")


@dataclass(frozen=True)
class SoftmaxOptions(Mixer):
    """The options of a layer of causal softmax attention, and its parameters and sites.

    Attributes:
        rotary_base: the base of RoPE's angles; None: no RoPE.
        rotary_share: the share of each head's features, the first ones, that RoPE turns.
        bias: whether the projection to queries, keys and values has a bias.
        dropout: the dropout of attention's probabilities.
        kernel: one of FLASH_KERNELS, whose rates time the attention; "cudnn", flash attention that takes
            hidden states [L, B, H], so that libraries with this layout copy no output; or "unfused", which
            makes all scores.
        window: the most positions that a position attends to, itself included; None: all.
        sinks: whether each head has a learned logit that joins the softmax's denominator
            (:mod:`spbench.impls.kernels.sinks`).
        gated: whether the sigmoid of a gate, a projection of the input, multiplies each head's output
            (Qwen3-Next, whose code has one matmul for queries and gates).
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
        """Whether the projection's rows are ordered by groups of heads (:class:`GroupedQueryLinear`)."""
        return self.bias or model.grouped

    @property
    def needs_all_positions(self) -> bool:
        """Whether a rank needs all positions of its heads to compute this attention."""
        return self.dropout > 0 or self.kernel == "unfused"

    def attended(self, packed: Attended, seq_len: int) -> Attended:
        """The positions that a position attends to in this layer, in a sequence that is ``packed`` so."""
        return packed.in_layer(self.window, seq_len)

    def heeded(self, packed: Attended, seq_len: int) -> dict[str, int]:
        """The dims of a site that describe this layer's documents, window and sinks."""
        return self.attended(packed, seq_len).dims | ({"sinks": 1} if self.sinks else {})

    def width(self, model: DecoderOptions) -> int:
        return model.attention_width

    def gathers_once(self, model: DecoderOptions) -> bool:
        return bool(model.separate_projections)

    def norm_weights(self, model: DecoderOptions) -> int:
        """The number of weights and biases, each of one head's size, of the norms of queries and keys."""
        heads = model.heads + (model.kv_heads or model.heads) if model.qk_norm_over == "all" else 2
        return heads * (2 if model.norm == "layer" else 1) if model.qk_norm else 0

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
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
        """The site of the attention itself, where positions meet; ``heads``: the site's dims of heads."""
        kind: SiteKind = "whole_attention" if self.needs_all_positions else "causal_attention"
        kept = {"kept": 1} if model.keeps_operators else {}
        again = again or model.recomputes("core_attn")
        packed = model.attended(seq_len)
        dims = {"B": batch, "L": seq_len, **heads, **kept, **self.heeded(packed, seq_len)}
        return Site(kind, 1, dims, again, attended=self.attended(packed, seq_len), packed=packed)


#: for verification: a head's query and key have 6 features, its value 5
TINY_LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
#: for verification: a query chooses 5 of 24 positions
TINY_INDEX: Mapping[str, Any] = {"index_n_heads": 3, "index_head_dim": 6, "index_topk": 5}


@dataclass(frozen=True)
class LatentSizes:
    """The options of multi-head latent attention (MLA, arXiv 2405.04434, section 2.1), which replaces plain
    softmax attention.

    Keys and values of all heads are projected from one latent vector for each position; queries may come
    from a latent of their own. A head's query and key have features without a position and features that
    RoPE turns; the keys of all heads share the latter.

    Attributes:
        kv_lora_rank: features of the latent of keys and values; 0: no latent attention.
        q_lora_rank: features of the queries' latent; None: queries are projected from the hidden state.
        qk_nope_head_dim: features of a head's query and key without a position.
        qk_rope_head_dim: features of a head's query and key that RoPE turns.
        v_head_dim: features of a head's value.
        latent_norms: whether both latents are normalised (in Megatron-LM only with --qk-layernorm).
        padded_values: whether values are padded with zeros to the head size of keys, for kernels and messages
            with one head size (transformers with FlashAttention-2).
        index_n_heads: heads of the indexer that chooses the positions that each position attends to
            (DeepSeek-V3.2, :mod:`spbench.impls.models.blocks.indexer`); 0: attention to all positions.
        index_head_dim: features of a head of the indexer, of which RoPE turns the first qk_rope_head_dim.
        index_topk: the most positions that a position attends to.
        index_tile: the most queries of a rank whose index scores are in memory at once; 0: all.
        indexed_attention: "chosen": kernels that read only the chosen rows; "masked": all scores are in
            memory, the indexer's by head too, as in transformers' eager attention.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    latent_norms: bool = True
    padded_values: bool = False
    index_n_heads: int = 0
    index_head_dim: int = 128
    index_topk: int = 2048
    index_tile: int = 0
    indexed_attention: str = "chosen"


@dataclass(frozen=True)
class LatentOptions(LatentSizes):
    """The options of latent attention, and of multi-token prediction (arXiv 2412.19437, section 2.2).

    Attributes:
        mtp_layers: the number of modules of multi-token prediction; module d predicts the token d + 1 ahead
            from the hidden state of module d - 1 and the token before the predicted one.
        mtp_weight: the weight of the mean of these modules' losses.
    """

    mtp_layers: int = 0
    mtp_weight: float = 0.3

    #: options that no indexer goes with, by their names
    not_indexed: ClassVar[Sequence[str]] = (
        "window",
        "sinks",
        "attention_dropout",
        "padded_values",
        "lora_rank",
    )

    @property
    def latent(self) -> dict[str, Any]:
        """The options of :class:`LatentSizes` as keyword arguments."""
        return {each.name: getattr(self, each.name) for each in fields(LatentSizes)}

    @property
    def of_one_head_size(self) -> Mapping[str, Any]:
        """The change of options that pads values to the head size of keys; {}: no padding is needed."""
        keys = self.qk_nope_head_dim + self.qk_rope_head_dim
        heads_apart = self.kv_lora_rank and not self.index_n_heads
        return {"padded_values": True} if heads_apart and self.v_head_dim < keys else {}

    @property
    def small_latent(self) -> dict[str, Any]:
        """The options in the sizes of :data:`TINY_LATENT`; queries without a latent stay without one."""
        none = {"q_lora_rank": None} if self.q_lora_rank is None else {}
        few = {**TINY_LATENT, **none, "mtp_layers": min(1, self.mtp_layers)}
        return few | (dict(TINY_INDEX) if self.index_n_heads else {})

    def latent_variants(self) -> list[Mapping[str, Any]]:
        """The changes of these options that verification tries; see :meth:`Model.variants`."""
        if not self.kv_lora_rank:
            return []
        if self.index_n_heads:
            return [
                {"mtp_layers": 2, "documents": (7, 1, 11, 5), "index_tile": 5},
                {"indexed_attention": "masked", "recompute": "selective"},
                {"index_topk": 64, "library": "transformer-engine", "recompute": "selective"},
            ]
        return [
            {"q_lora_rank": None, "padded_values": True, "mtp_layers": 0}
            | {"recompute": "selective", "recompute_modules": ("core_attn", "mla_up_proj")},
            {"mtp_layers": 2, "documents": (7, 1, 11, 5), "library": "transformer-engine"},
            {"recompute": "selective", "recompute_modules": ("mla_up_proj",), "latent_norms": False},
        ]

    def check_latent(self) -> None:
        """Raise ValueError where these options contradict each other or other options."""
        if min(self.kv_lora_rank, self.mtp_layers) < 0:
            raise ValueError("kv_lora_rank and mtp_layers are at least 0")
        if not self.kv_lora_rank:
            if (
                self.q_lora_rank is not None
                or self.padded_values
                or self.index_n_heads
                or not self.latent_norms
            ):
                what = "q_lora_rank, latent_norms, padded_values and index_n_heads need"
                raise ValueError(f"{what} latent attention; set kv_lora_rank")
            return
        self._check_index()
        sizes: dict[str, Any] = {
            name: getattr(self, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        if self.q_lora_rank is not None:
            sizes["q_lora_rank"] = self.q_lora_rank
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is at least 1, not {size}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"RoPE turns pairs, but qk_rope_head_dim is {self.qk_rope_head_dim}")
        if self.padded_values and self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise ValueError(f"padded_values: v_head_dim {self.v_head_dim} is above the head size of keys")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                raise ValueError(f"latent attention has no {name}; leave it out")
        if getattr(self, "qk_norm", False) or getattr(self, "output_gate", False):
            raise ValueError("latent attention has neither qk_norm nor output_gate; leave them out")
        if getattr(self, "rotary_share", 1.0) != 1:
            raise ValueError("latent attention turns qk_rope_head_dim features; leave rotary_share out")

    def indexes(self, options: Mapping[str, Any]) -> bool:
        """Whether an indexer goes with these options, each at the value that it has there."""
        return (
            not any(options.get(name) for name in self.not_indexed) and options.get("attention") != "unfused"
        )

    def _check_index(self) -> None:
        """Raise ValueError where the options of the indexer contradict each other or other options."""
        check_choices(self, {"indexed_attention": WAYS})
        if self.index_n_heads < 0 or self.index_tile < 0:
            raise ValueError("index_n_heads and index_tile are at least 0")
        if not self.index_n_heads:
            if self.index_tile:
                raise ValueError("index_tile needs an indexer; set index_n_heads")
            return
        if self.index_topk < 1:
            raise ValueError(f"index_topk is at least 1, not {self.index_topk}")
        if self.index_head_dim < self.qk_rope_head_dim:
            turned = f"qk_rope_head_dim {self.qk_rope_head_dim}"
            raise ValueError(f"index_head_dim {self.index_head_dim} is below {turned}, which RoPE turns")
        if self.q_lora_rank is None or not self.latent_norms:
            raise ValueError("an indexer needs the normalised latent of queries; set q_lora_rank")
        if not self.indexes(vars(self)):
            raise ValueError(f"an indexer goes without {', '.join(self.not_indexed)} and attention: unfused")
        if self.recomputes("mla_up_proj"):  # type: ignore[attr-defined]
            raise ValueError("with an indexer no keys and values are projected up; leave mla_up_proj out")
