"""A causal transformer with softmax attention, as Llama (arXiv 2302.13971): RoPE, RMS norms, SwiGLU.

The option ``kv_heads`` gives the model the grouped queries of Llama 3 (arXiv 2407.21783), and ``qk_norm`` the
normalised queries and keys of Qwen3 (arXiv 2505.09388). With layer norms before each half of a layer, learned
positions, biases, GELU, dropout, and a head that shares the weights of the word embedding, the model is GPT-3
(Brown et al., arXiv 2005.14165).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from spbench.impls.attended import Attended
from spbench.impls.models.blocks.decoder import TINY_SIZES, DecoderModel
from spbench.impls.models.blocks.indexer import IndexedAttention
from spbench.impls.models.blocks.latent_mixer import LatentAttention
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.packing import check_window
from spbench.impls.models.blocks.recurrent_mixer import RecurrentLayer
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.softmax_options import KERNELS, LatentOptions
from spbench.impls.models.presets import published
from spbench.impls.options import check_choices

#: the window for verification, of 24 positions: two chunks of one of four ranks, one chunk of one of three
TINY_WINDOW = 8

#: the MLPs by the values of the option ``mlp``: the activation, and whether a second projection is the gate
MLPS = {
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "tanh_geglu": ("tanh_gelu", True),
    "gelu": ("tanh_gelu", False),
    "erf_gelu": ("gelu", False),
    "relu": ("relu", False),
    "squared_relu": ("squared_relu", False),
    "clamped_swiglu": ("clamped_silu", True),
}


@dataclass(frozen=True)
class CausalTransformerModel(LatentOptions, DecoderModel):
    """The options of a causal transformer with softmax attention in every layer.

    Attributes:
        norm: the kind of norms: "rms", or "layer" (with a bias).
        norms: the place of norms: "before" the mixer and the MLP, "behind" each of the two (OLMo 2, arXiv
            2501.00656), "around" each (Gemma 2, arXiv 2408.00118), or "shared", one before both (Phi-2,
            Falcon-7B; with parallel_residual).
        embedding_scaled: whether embedded words are multiplied by the root of ``hidden`` (Gemma).
        logit_cap: c, where logits x become c tanh(x / c) (Gemma 2); 0: logits stay as they are.
        mlp: a key of MLPS; "gelu" is the tanh approximation.
        biases: whether all projections but the head have biases.
        qkv_bias: whether the projection to queries, keys and values has a bias (Qwen2, arXiv 2407.10671).
        position: "rotary", "learned" or "none".
        max_positions: rows of the table of learned positions.
        rotary_base: the base of RoPE's angles.
        rotary_share: the share of a head's features that RoPE turns (GPT-NeoX-20B, arXiv 2204.06745: 0.25).
        parallel_residual: whether attention and MLP take the same input, to which both results are added.
            Under tensor parallelism a layer makes two sums over ranks, where GPT-NeoX's own code makes one.
        dropout: the dropout of the embedding and of the results of mixers and MLPs.
        attention_dropout: the dropout of attention's probabilities.
        attention: the kernel of attention, one of :data:`KERNELS`.
        window: the most positions that a position attends to in every layer, itself included: query i sees
            keys j with i - window < j <= i (``sliding_window`` of Mistral 7B, arXiv 2310.06825); None: all.
        sinks: whether each head has a learned logit that joins the softmax's denominator (gpt-oss, arXiv
            2508.10925).
        loader_mask: whether forward of the first and the last pipeline stage holds a boolean mask
            [B, 1, L, L], which no kernel reads, as Megatron-LM's data loader makes one without
            --no-create-attention-mask-in-dataloader."""

    norm: str = "rms"  # type: ignore[misc]  # an option of this model, a constant of other decoders
    norms: str = "before"  # type: ignore[misc]
    embedding_scaled: bool = False  # type: ignore[misc]
    logit_cap: float = 0.0  # type: ignore[misc]
    mlp: str = "swiglu"
    biases: bool = False  # type: ignore[misc]
    qkv_bias: bool = False
    position: str = "rotary"
    max_positions: int = 2048
    rotary_base: float = 10_000.0
    rotary_share: float = 1.0
    parallel_residual: bool = False  # type: ignore[misc]
    dropout: float = 0.0  # type: ignore[misc]
    attention_dropout: float = 0.0
    attention: str = "flash"
    window: int | None = None
    sinks: bool = False
    loader_mask: bool = False  # type: ignore[misc]

    plain_options: ClassVar[Mapping[str, Any]] = {
        **DecoderModel.plain_options,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "attention": "flash",
        "index_tile": 0,
        "indexed_attention": "masked",
    }

    def __post_init__(self) -> None:
        check_choices(
            self,
            {
                "norm": ("rms", "layer"),
                "norms": ("before", "behind", "around", "shared"),
                "mlp": MLPS,
                "position": ("rotary", "learned", "none"),
                "attention": KERNELS,
            },
        )
        check_window(self.window)
        self.check_latent()
        if self.mtp_layers and self.position == "learned":
            raise ValueError("multi-token prediction has no learned positions; leave mtp_layers out")
        if self.norms == "shared" and not self.parallel_residual:
            raise ValueError("norms: shared needs parallel_residual")
        if self.norms in ("behind", "around") and (self.biases or self.parallel_residual):
            raise ValueError(f"norms: {self.norms} goes with neither biases nor parallel_residual")
        if self.logit_cap < 0 or (self.logit_cap and self.vocabulary_tile):
            raise ValueError("logit_cap is at least 0, and needs logits: leave vocabulary_tile out")
        if self.embedding_scaled and self.mtp_layers:
            raise ValueError("multi-token prediction embeds words as they are; leave embedding_scaled out")
        super().__post_init__()
        if (turned := int(self.head_size * self.rotary_share)) % 2 and self.position == "rotary":
            of_head = f"rotary_share {self.rotary_share} of a head's {self.head_size} features"
            raise ValueError(f"RoPE turns pairs, but {of_head} are {turned}")

    @property
    def attention_kernel(self) -> str:
        return self.attention

    def shrunk(self) -> Self:
        # rotary_share becomes 0.5, because a quarter of a small head's features may be an odd number
        few = replace(self, **self.small_latent) if self.kv_lora_rank else self
        smaller = super(CausalTransformerModel, few).shrunk()
        if self.window is not None:  # a window that is shorter than verification's sequences
            smaller = replace(smaller, window=TINY_WINDOW)
        return smaller if self.rotary_share == 1 else replace(smaller, rotary_share=0.5)

    def attended(self, seq_len: int) -> Attended:
        mixers = [self.mixing(layer) for layer in range(min(self.layers, self.period))]
        windows = {m.window if isinstance(m, SoftmaxAttention) else None for m in mixers}
        # the window that all layers share; None where layers differ
        return super().attended(seq_len).in_layer(windows.pop() if len(windows) == 1 else None, seq_len)

    @property
    def gated_mlp(self) -> bool:  # type: ignore[override]
        return MLPS[self.mlp][1]

    @property
    def activation(self) -> str:  # type: ignore[override]
        return MLPS[self.mlp][0]

    @property
    def learned_positions(self) -> int | None:  # type: ignore[override]
        return self.max_positions if self.position == "learned" else None

    def mixing(self, layer: int) -> LinearAttention | SoftmaxAttention | RecurrentLayer:
        further: dict[str, Any] = {
            "rotary_base": self.rotary_base if self.position == "rotary" else None,
            "bias": self.biases or self.qkv_bias,
            "dropout": self.attention_dropout,
            "kernel": self.attention,
            "rotary_share": self.rotary_share,
            "window": self.window,
            "sinks": self.sinks,
        }
        if self.index_n_heads:
            return IndexedAttention(**further, **self.latent)
        return LatentAttention(**further, **self.latent) if self.kv_lora_rank else SoftmaxAttention(**further)

    def variants(self) -> list[Mapping[str, Any]]:
        every = [
            *super().variants(),
            {"library": "transformer-engine", "cross_entropy": "in_place", "recompute": "selective"}
            | dict(self._with_norms("behind")),
            {"library": "megatron-local", "attention": "unfused", "recompute": "full", "recompute_layers": 2},
            # no separate projections with biases: without RoPE a key's bias has a gradient of rounding errors
            {"separate_projections": not self.biases, "recompute": "operators"},
            {"window": TINY_WINDOW, "sinks": True, **self._with_norms("around")}
            | ({} if self.biases else {"separate_projections": "mlp"}),
            *self.latent_variants(),
            *self.adapter_variants(),
        ]
        return [each for each in every if not self.index_n_heads or self.indexes(each)]

    def _with_norms(self, norms: str) -> Mapping[str, Any]:
        """The options of a variant with norms at ``norms``, or at another place that this model allows."""
        if self.biases or self.parallel_residual:
            return {"norms": "shared"} if self.parallel_residual and norms == "behind" else {}
        if norms == "around":  # as Gemma 2
            return {"norms": norms, "embedding_scaled": not self.mtp_layers, "logit_cap": 0.5}
        return {"norms": norms, **({"qk_norm_over": "all"} if self.qk_norm else {})}


#: GPT-3 as Megatron-LM trains this model
_GPT: Mapping[str, Any] = {
    "norm": "layer",
    "mlp": "gelu",
    "biases": True,
    "position": "learned",
    "tied": True,
    "vocabulary": 50257,  # GPT-2's
    "vocabulary_multiple": 128,  # Megatron-LM's make-vocab-size-divisible-by
    "norm_epsilon": 1e-5,
    "cross_entropy": "fused",
}
_DROPOUT: Mapping[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}  # Megatron-LM's defaults

PRESETS = {
    **published("causal_transformer", CausalTransformerModel),
    # 2, 3 or 4 ranks divide 12 experts
    "moe-tiny": CausalTransformerModel(
        **TINY_SIZES, kv_heads=4, experts=12, experts_per_token=3, expert_inner=24, router_normalized=True
    ),
    "causal-transformer-tiny": CausalTransformerModel(**TINY_SIZES),
    # 2 or 4 ranks split 4 heads of keys and values; of 12 ranks several hold each head
    "causal-transformer-tiny-gqa": CausalTransformerModel(**TINY_SIZES, kv_heads=4, qk_norm=True),
    # Megatron-LM's examples/gpt3/train_gpt3_345m; 354.9e6 parameters
    "gpt3-345m": CausalTransformerModel(
        **_GPT, **_DROPOUT, layers=24, hidden=1024, heads=16, inner=4096, max_positions=1024
    ),
    # arXiv 2005.14165, table 2.1: "GPT-3 6.7B" and "GPT-3 175B"
    "gpt3-7b": CausalTransformerModel(**_GPT, **_DROPOUT, layers=32, hidden=4096, heads=32, inner=16384),
    "gpt3-175b": CausalTransformerModel(**_GPT, **_DROPOUT, layers=96, hidden=12288, heads=96, inner=49152),
    # for verification, without dropout, because dropout's masks depend on the layout of tensors
    "gpt3-tiny": CausalTransformerModel(**{**_GPT, **TINY_SIZES, "vocabulary_multiple": 1}, max_positions=64),
}
