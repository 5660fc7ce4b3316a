"""Nemotron-H (``NemotronHForCausalLM``, arXiv 2504.03624): layers of Mamba-2, attention, MLPs and experts."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.huggingface.config import SizedConfig, not_covered
from spbench.impls.models.hybrid import HybridModel


class NemotronHConfig(SizedConfig):
    """Nemotron-H's layers, by the letters of ``hybrid_override_pattern``: Mamba-2 (M), softmax attention
    without positions (*), an MLP of squared ReLU (-), experts of squared ReLU (E), each with its own norm."""

    name: ClassVar[str] = "nemotron_h"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "attention_bias": [False],
        "attention_dropout": [0],
        "hidden_act": ["relu2"],
        "hidden_dropout": [0],
        "mamba_hidden_act": ["silu"],
        "mamba_proj_bias": [False],
        "mlp_bias": [False],
        "mlp_hidden_act": ["relu2"],
        "residual_in_fp32": [False],
        "use_bias": [False],
        "use_conv_bias": [True],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "chunk_size",
            "expand",  # the inner width, which follows from the heads and their size
            "layer_norm_epsilon",
            "mamba_ssm_cache_dtype",
            "mamba_dt_init_floor",
            "num_logits_to_keep",
            "partial_rotary_factor",  # attention has no RoPE
            "rescale_prenorm_residual",
            "rope_theta",
            "sliding_window",  # null in all published files
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "time_step_min",
            "use_mamba_kernels",
        }
    )

    hybrid_override_pattern: str
    num_key_value_heads: PositiveInt
    attention_head_dim: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    mamba_num_heads: PositiveInt
    mamba_head_dim: PositiveInt
    n_groups: PositiveInt
    ssm_state_size: PositiveInt
    conv_kernel: PositiveInt = 4
    rms_norm_eps: PositiveFloat | None = None
    norm_eps: PositiveFloat = 1e-5
    n_routed_experts: PositiveInt | None = None
    n_shared_experts: NonNegativeInt = 1
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0
    tie_word_embeddings: bool = False

    def model(self) -> HybridModel:
        pattern, heads = self.hybrid_override_pattern, self.num_attention_heads
        if set(pattern) - set("M*-E"):
            raise not_covered("hybrid_override_pattern", pattern, "a letter is M, *, - or E")
        if len(pattern) != self.num_hidden_layers:
            raise not_covered("num_hidden_layers", self.num_hidden_layers, "the pattern has another number")
        if re.search("^[-E]|[-E][-E]", pattern):
            why = "an MLP or experts here come after a layer of M or *"
            raise not_covered("hybrid_override_pattern", pattern, why)
        size = self.attention_head_dim or self.head_dim or self.hidden_size // heads
        return HybridModel(
            pattern=pattern.replace("*", "S"),
            layers=sum(letter in "M*" for letter in pattern),
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=None if self.num_key_value_heads == heads else self.num_key_value_heads,
            head_dim=None if size == self.hidden_size / heads else size,
            inner=self.intermediate_size,
            mlp="squared_relu",
            position="none",
            vocabulary=self.vocab_size,
            tied=self.tie_word_embeddings,
            norm_epsilon=self.rms_norm_eps or self.norm_eps,
            state_heads=self.mamba_num_heads,
            state_key_heads=self.n_groups,
            key_size=self.ssm_state_size,
            value_size=self.mamba_head_dim,
            convolution=self.conv_kernel,
            **(self._expert_options() if "E" in pattern else {}),
        )

    def _expert_options(self) -> dict[str, Any]:
        """The options of experts, with sigmoid scores, a bias for the choice, and shared experts."""
        for field in ("n_routed_experts", "num_experts_per_tok"):
            if getattr(self, field) is None:
                raise not_covered(field, None, "the pattern has layers of experts, E")
        features = self.moe_intermediate_size or self.intermediate_size
        groups = {"router_groups": self.n_group, "router_group_topk": self.topk_group}
        return {
            "experts": self.n_routed_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_inner": None if features == self.intermediate_size else features,
            "shared_inner": self.n_shared_experts * (self.moe_shared_expert_intermediate_size or features),
            "router": "sigmoid",
            "router_normalized": self.norm_topk_prob,
            "router_scale": self.routed_scaling_factor,
            "router_bias": True,
            **(groups if self.n_group > 1 else {}),
        }
