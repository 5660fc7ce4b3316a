"""Families whose layers have experts in place of an MLP: Mixtral (arXiv 2401.04088), Qwen1.5-MoE and Qwen2
with experts (``Qwen2MoeForCausalLM``, arXiv 2407.10671), Qwen3 with experts (arXiv 2505.09388), and gpt-oss
(``GptOssForCausalLM``, arXiv 2508.10925) with windows in every other layer and attention sinks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface import llama
from spbench.impls.models.huggingface.config import Config, not_covered


def balanced(weight: float, over: str = "batch") -> dict[str, Any]:
    """The options of a loss that balances the experts' loads over "batch" or "sequence"; {} for weight 0."""
    return {"aux_loss": over, "aux_weight": weight} if weight else {}


def layers_with_experts(flags: Sequence[bool]) -> dict[str, Any]:
    """The options of a model whose i-th layer has experts where the i-th flag is true."""
    dense = next((i for i, has in enumerate(flags) if has), len(flags))
    if all(flags[dense:]):
        return {"dense_layers": dense}
    whole = [*map(int, flags)]
    repeated = (whole[:n] for n in range(1, len(whole) + 1))
    return {"expert_pattern": next(tuple(p) for p in repeated if (p * len(whole))[: len(whole)] == whole)}


class MixtralConfig(llama.MistralConfig):
    """Mixtral's layers: Mistral's, by default without a window, with ``num_local_experts`` experts in each
    layer, weighted by a softmax over the logits of the chosen experts."""

    name: ClassVar[str] = "mixtral"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {**llama.MistralConfig.fixed, "router_jitter_noise": [0]}
    ignored: ClassVar[frozenset[str]] = frozenset({"output_router_logits"})

    sliding_window: PositiveInt | None = None
    rope_theta: PositiveFloat = 1e6
    rms_norm_eps: PositiveFloat = 1e-5
    num_local_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2
    router_aux_loss_coef: NonNegativeFloat = 0.001

    def family_options(self) -> dict[str, Any]:
        return {
            "experts": self.num_local_experts,
            "experts_per_token": self.num_experts_per_tok,
            "router_scores": "chosen",
            **balanced(self.router_aux_loss_coef),
        }


class QwenExpertsConfig(Config):
    """The fields of experts that Qwen's families share: every ``decoder_sparse_step``-th layer has experts,
    but for ``mlp_only_layers``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"output_router_logits"})

    num_hidden_layers: PositiveInt
    num_experts: NonNegativeInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: Sequence[NonNegativeInt] = ()
    norm_topk_prob: bool = False
    router_aux_loss_coef: NonNegativeFloat = 0.001

    def family_options(self) -> dict[str, Any]:
        options: dict[str, Any] = super().family_options()  # type: ignore[misc]  # of the family without experts
        if not self.num_experts:
            return options
        if others := [i for i in self.mlp_only_layers if i >= self.num_hidden_layers]:
            raise not_covered("mlp_only_layers", others, f"there are {self.num_hidden_layers} layers")
        step, without = self.decoder_sparse_step, self.mlp_only_layers
        flags = [(i + 1) % step == 0 and i not in without for i in range(self.num_hidden_layers)]
        shared = getattr(self, "shared_expert_intermediate_size", 0)
        return options | {
            "experts": self.num_experts,
            "experts_per_token": self.num_experts_per_tok,
            "expert_inner": self.moe_intermediate_size,
            "router_normalized": self.norm_topk_prob,
            **({"shared_inner": shared, "shared_gate": True} if shared else {}),
            **layers_with_experts(flags),
            **balanced(self.router_aux_loss_coef),
        }


class Qwen2MoeConfig(QwenExpertsConfig, llama.Qwen2Config):
    """Qwen2-MoE's layers: Qwen2's, with shared experts behind a gate."""

    name: ClassVar[str] = "qwen2_moe"

    num_experts: NonNegativeInt = 60
    num_experts_per_tok: PositiveInt = 4
    moe_intermediate_size: PositiveInt = 1408
    shared_expert_intermediate_size: PositiveInt = 5632


class Qwen3MoeConfig(QwenExpertsConfig, llama.Qwen3Config):
    """The layers of Qwen3 with experts: Qwen3's, with routed experts, and by default no ``head_dim``."""

    name: ClassVar[str] = "qwen3_moe"

    head_dim: PositiveInt | None = None
    num_experts: NonNegativeInt = 128
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 768


class GptOssConfig(llama.RotaryConfig):
    """gpt-oss's layers: experts, attention sinks, and biases of all projections but the head (the router's
    and the experts' too); by default every other layer has a window."""

    name: ClassVar[str] = "gpt_oss"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "attention_bias": [True],
        "attention_dropout": [0],
        "hidden_act": ["silu"],
        "swiglu_limit": [7],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "experts_per_token",  # the same number as num_experts_per_tok
            "initial_context_length",
            "output_router_logits",
            "quantization_config",  # how the published weights are stored
        }
    )

    vocab_size: PositiveInt = 201088
    hidden_size: PositiveInt = 2880
    intermediate_size: PositiveInt = 2880
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt = 64
    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt = 64
    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt = 4
    layer_types: Sequence[llama.LayerType] | None = None
    sliding_window: PositiveInt = 128
    router_aux_loss_coef: NonNegativeFloat = 0.9
    rope_theta: PositiveFloat = 150_000.0
    rms_norm_eps: PositiveFloat = 1e-5
    tie_word_embeddings: bool = False

    def model(self) -> CausalTransformerModel:
        if self.partial_rotary_factor != 1:
            raise not_covered("partial_rotary_factor", self.partial_rotary_factor, "it must be 1")
        every = CausalTransformerModel(
            **self.options(),
            mlp="clamped_swiglu",
            sinks=True,
            biases=True,
            experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            expert_biases=True,
            router_scores="chosen",
            router_linear_bias=True,
            **balanced(self.router_aux_loss_coef),
        )
        letters = llama.letters_of(self.layer_types, self.num_hidden_layers, "WS")
        return llama.windowed(every, letters, self.sliding_window)
