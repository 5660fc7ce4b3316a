"""Kimi Linear (``KimiLinearForCausalLM``, arXiv 2510.26692): Kimi Delta Attention in most layers, latent
attention without positions in the others, and DeepSeek-V3's experts."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from spbench.impls.models.huggingface.config import Config, not_covered
from spbench.impls.models.huggingface.deepseek import LatentExpertsConfig
from spbench.impls.models.huggingface.llama import repeated_pattern
from spbench.impls.models.hybrid import HybridModel


class KimiDeltaFields(BaseModel):
    """The fields of ``linear_attn_config``: the heads of KDA, and the numbers, from 1, of the layers of each
    kind."""

    model_config = Config.model_config

    head_dim: PositiveInt
    num_heads: PositiveInt
    short_conv_kernel_size: PositiveInt
    kda_layers: Sequence[PositiveInt]
    full_attn_layers: Sequence[PositiveInt]


class KimiLinearConfig(LatentExpertsConfig):
    """Kimi Linear's layers: an MLP in the first ``first_k_dense_replace``, and experts in the others."""

    name: ClassVar[str] = "kimi_linear"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "hidden_act": ["silu"],
        "mla_use_nope": [True],
        "moe_layer_freq": [1],
        "num_expert_group": [1],
        "num_nextn_predict_layers": [0],
        "topk_group": [1],
        "use_grouped_topk": [True, False],  # of one group
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "head_dim",  # no layer's: those of latent attention have names of their own
            "model_max_length",
            "num_key_value_heads",  # which latent attention does not have
            "rope_scaling",
            "rope_theta",  # no layer has RoPE
        }
    )

    linear_attn_config: KimiDeltaFields
    num_experts: PositiveInt
    num_experts_per_token: PositiveInt
    num_shared_experts: NonNegativeInt = 1
    moe_router_activation_func: Literal["softmax", "sigmoid"] = "sigmoid"
    moe_renormalize: bool = True

    def model(self) -> HybridModel:
        states, layers = self.linear_attn_config, range(1, self.num_hidden_layers + 1)
        if sorted([*states.kda_layers, *states.full_attn_layers]) != [*layers]:
            why = f"kda_layers and full_attn_layers name each of {self.num_hidden_layers} layers once"
            raise not_covered("linear_attn_config", states.model_dump(), why)
        return HybridModel(
            pattern=repeated_pattern("".join("K" if i in states.kda_layers else "S" for i in layers)),
            position="none",
            **self.said(),
            **self.latent_options(),
            state_heads=states.num_heads,
            state_key_heads=states.num_heads,
            key_size=states.head_dim,
            value_size=states.head_dim,
            convolution=states.short_conv_kernel_size,
            experts=self.num_experts,
            experts_per_token=self.num_experts_per_token,
            expert_inner=self.moe_intermediate_size,
            shared_inner=self.num_shared_experts * self.moe_intermediate_size,
            dense_layers=self.first_k_dense_replace,
            router=self.moe_router_activation_func,
            router_bias=True,
            router_normalized=self.moe_renormalize,
            router_scale=self.routed_scaling_factor,
        )
