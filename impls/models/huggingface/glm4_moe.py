"""Families with DeepSeek-V3's router and other attention: GLM-4.5 to 4.7 (arXiv 2508.06471), whose small
GLM-4.7-Flash has latent attention, and MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.huggingface.deepseek import DeepseekV3Config
from spbench.impls.models.huggingface.llama import LlamaConfig


class Glm4MoeLiteConfig(DeepseekV3Config):
    """As DeepSeek-V3's, with one dense layer where a file does not say otherwise."""

    name: ClassVar[str] = "glm4_moe_lite"

    routed_scaling_factor: PositiveFloat = 1.8
    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1
    first_k_dense_replace: NonNegativeInt = 1
    rms_norm_eps: PositiveFloat = 1e-5


class Glm4MoeConfig(LlamaConfig):
    """Grouped-query attention with biases of queries, keys and values; sigmoid scores, a bias for the choice,
    and experts that every token meets. Modules of multi-token prediction, which transformers leaves out, are
    left out."""

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
    """Grouped-query attention with RoPE on ``rotary_dim`` features of a head, normalised queries and keys
    (over a head here, over all heads there), and experts in each layer. Modules of multi-token prediction are
    left out, as transformers does."""

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
