"""gpt-oss (``GptOssForCausalLM``, arXiv 2508.10925): experts in each layer, windows in every other one, and
attention sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import not_covered
from spbench.impls.models.huggingface.llama import LayerType, RotaryConfig, letters_of, windowed
from spbench.impls.models.huggingface.mixtral import balanced


class GptOssConfig(RotaryConfig):
    """All projections but the head have biases, the router's and the experts' too; layers take turns with a
    window and without one where a file does not list them."""

    name: ClassVar[str] = "gpt_oss"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "attention_bias": [True],
        "attention_dropout": [0],
        "hidden_act": ["silu"],
        "swiglu_limit": [7],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "experts_per_token",  # as num_experts_per_tok
            "initial_context_length",
            "output_router_logits",
            "quantization_config",  # of the weights as they are stored
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
    layer_types: Sequence[LayerType] | None = None
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
        letters = letters_of(self.layer_types, self.num_hidden_layers, "WS")
        return windowed(every, letters, self.sliding_window)
