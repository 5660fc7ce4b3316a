"""DeepSeek-V2 (arXiv 2405.04434), V3 (arXiv 2412.19437), and Moonlight and Kimi-K2 with V3's layers: latent
attention, routed and shared experts, and modules of multi-token prediction. DeepSeek-V3.2 (arXiv 2512.02556)
and GLM-5 (arXiv 2602.15763) have V3's layers with an indexer.

Families with DeepSeek-V3's router and other attention: GLM-4.5 to 4.7 (arXiv 2508.06471), whose small
GLM-4.7-Flash has latent attention, and MiniMax-M2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import SizedConfig, not_covered
from spbench.impls.models.huggingface.llama import LlamaConfig, RotaryConfig
from spbench.impls.models.huggingface.mixtral import balanced


class LatentExpertsConfig(SizedConfig):
    """The fields that DeepSeek's families and Kimi Linear share."""

    moe_intermediate_size: PositiveInt
    kv_lora_rank: PositiveInt
    q_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    first_k_dense_replace: NonNegativeInt = 0
    routed_scaling_factor: PositiveFloat = 1.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False

    def latent_options(self) -> dict[str, Any]:
        """The options of latent attention, which have the names of the fields."""
        sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {name: getattr(self, name) for name in sizes}


class DeepseekV2Config(RotaryConfig, LatentExpertsConfig):
    """DeepSeek-V2's layers: latent attention, with a latent of queries unless ``q_lora_rank`` is null; an MLP
    in the first ``first_k_dense_replace`` layers, and experts in the others.

    YaRN's angles and its scale of the softmax (``mscale``) are left out, for they change no shape or cost.
    """

    name: ClassVar[str] = "deepseek_v2"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "attention_bias": [False],
        "attention_dropout": [0],
        "hidden_act": ["silu"],
        "mlp_bias": [False],
        "moe_layer_freq": [1],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "ep_size",
            "head_dim",  # newer files repeat qk_rope_head_dim under this name
            "output_router_logits",
            "qk_head_dim",  # the sum of qk_nope_head_dim and qk_rope_head_dim
            "quantization_config",  # how the published weights are stored
            "rope_interleave",  # which features RoPE turns in pairs
        }
    )

    num_key_value_heads: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = 1536
    n_routed_experts: PositiveInt | None = None
    n_shared_experts: NonNegativeInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    aux_loss_alpha: NonNegativeFloat = 0.0
    seq_aux: bool = True
    num_nextn_predict_layers: NonNegativeInt = 0

    def model(self) -> CausalTransformerModel:
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            why = f"latent attention has as many as num_attention_heads, {heads}"
            raise not_covered("num_key_value_heads", self.num_key_value_heads, why)
        return CausalTransformerModel(
            **self.options() | {"rotary_share": 1.0},  # RoPE turns all qk_rope_head_dim features
            **self.latent_options(),
            mtp_layers=self.num_nextn_predict_layers,
            **self.index_options(),
            **self._expert_options(),
        )

    def index_options(self) -> dict[str, Any]:
        """The model's options of the indexer; {}: the family has none."""
        return {}

    def _expert_options(self) -> dict[str, Any]:
        if self.n_routed_experts is None or self.first_k_dense_replace >= self.num_hidden_layers:
            return {}
        if self.num_experts_per_tok is None:
            raise not_covered("num_experts_per_tok", None, "there are n_routed_experts")
        groups = {"router_groups": self.n_group, "router_group_topk": self.topk_group}
        limited = self.topk_method != "greedy" and (self.n_group or 1) > 1
        return {
            "experts": self.n_routed_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_inner": self.moe_intermediate_size,
            "shared_inner": (self.n_shared_experts or 0) * self.moe_intermediate_size,
            "dense_layers": self.first_k_dense_replace,
            "router": self.scoring_func,
            "router_normalized": self.norm_topk_prob,
            "router_scale": self.routed_scaling_factor,
            "router_bias": self.topk_method == "noaux_tc",
            **(groups if limited else {}),
            **balanced(self.aux_loss_alpha, "sequence" if self.seq_aux else "batch"),
        }


class DeepseekV3Config(DeepseekV2Config):
    """DeepSeek-V3's layers: V2's, by default with sigmoid scores and a bias that is added for the choice."""

    name: ClassVar[str] = "deepseek_v3"

    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "noaux_tc"
    scoring_func: Literal["softmax", "sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 2.5
    n_group: PositiveInt | None = 8
    topk_group: PositiveInt | None = 4
    first_k_dense_replace: NonNegativeInt = 3


class DeepseekV32Config(DeepseekV3Config):
    """DeepSeek-V3.2's layers: V3's, in which an indexer chooses the positions to attend to. In each layer the
    indexer chooses anew; ``indexer_types`` and the like of GLM-5.2, whose layers share choices, are refused.
    """

    name: ClassVar[str] = "deepseek_v32"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {**DeepseekV3Config.fixed, "index_topk_freq": [1]}
    #: which features the indexer's RoPE turns in pairs
    ignored: ClassVar[frozenset[str]] = DeepseekV3Config.ignored | {"indexer_rope_interleave"}

    index_head_dim: PositiveInt = 128
    index_n_heads: PositiveInt = 64
    index_topk: PositiveInt = 2048

    def index_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("index_head_dim", "index_n_heads", "index_topk")}


class GlmMoeDsaConfig(DeepseekV32Config):
    """GLM-5's layers: DeepSeek-V3.2's, by default without groups of experts."""

    name: ClassVar[str] = "glm_moe_dsa"

    q_lora_rank: PositiveInt | None = 2048
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    rms_norm_eps: PositiveFloat = 1e-5
    index_n_heads: PositiveInt = 32


class KimiK2Config(DeepseekV3Config):
    """Kimi-K2's layers (arXiv 2507.20534), which are DeepSeek-V3's."""

    name: ClassVar[str] = "kimi_k2"


class Glm4MoeLiteConfig(DeepseekV3Config):
    """GLM-4.7-Flash's layers: DeepSeek-V3's, by default with one dense layer and no groups of experts."""

    name: ClassVar[str] = "glm4_moe_lite"

    routed_scaling_factor: PositiveFloat = 1.8
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    first_k_dense_replace: NonNegativeInt = 1
    rms_norm_eps: PositiveFloat = 1e-5


class Glm4MoeConfig(LlamaConfig):
    """GLM-4.5's layers: grouped-query attention with biases of queries, keys and values; shared experts, and
    routed ones by sigmoid scores with a bias for the choice. The model leaves out modules of multi-token
    prediction, as transformers does."""

    name: ClassVar[str] = "glm4_moe"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "attention_bias": [True],
        "n_group": [1],
        "topk_group": [1],
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"num_nextn_predict_layers", "output_router_logits"})

    partial_rotary_factor: PositiveFloat = 0.5
    moe_intermediate_size: PositiveInt = 1408
    n_routed_experts: PositiveInt = 128
    n_shared_experts: NonNegativeInt = 1
    num_experts_per_tok: PositiveInt = 8
    first_k_dense_replace: NonNegativeInt = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    use_qk_norm: bool = False

    def family_options(self) -> dict[str, Any]:
        return {
            "qkv_bias": True,
            "qk_norm": self.use_qk_norm,
            "experts": self.n_routed_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_inner": self.moe_intermediate_size,
            "shared_inner": self.n_shared_experts * self.moe_intermediate_size,
            "dense_layers": self.first_k_dense_replace,
            "router": "sigmoid",
            "router_normalized": self.norm_topk_prob,
            "router_scale": self.routed_scaling_factor,
            "router_bias": True,
        }


class MinimaxM2Config(LlamaConfig):
    """MiniMax-M2's layers: grouped-query attention with RoPE on ``rotary_dim`` features of a head, norms of
    queries and keys (over each head, where MiniMax-M2 has one over all heads), and experts in each layer. The
    model leaves out modules of multi-token prediction, as transformers does."""

    name: ClassVar[str] = "minimax_m2"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "use_qk_norm": [True],
        "scoring_func": ["sigmoid"],
        "use_routing_bias": [True],
        "shared_intermediate_size": [0],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("mtp_transformer_layers", "num_mtp_modules", "use_mtp", "output_router_logits"),
            *("qk_norm_type", "quantization_config", "router_aux_loss_coef"),
        }
    )

    head_dim: PositiveInt | None = 128
    rotary_dim: PositiveInt | None = None
    num_local_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8

    def family_options(self) -> dict[str, Any]:
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        return {
            "qk_norm": True,
            "rotary_share": (self.rotary_dim or size) / size,
            "experts": self.num_local_experts,
            "experts_per_token": self.num_experts_per_tok,
            "router": "sigmoid",
            "router_normalized": True,
            "router_bias": True,
        }
