"""GPT-NeoX and Pythia (``GPTNeoXForCausalLM``, arXiv 2204.06745): RoPE on a share of each head, attention and
MLP beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.gpt2 import mlp_of
from spbench.impls.models.huggingface.llama import RotaryConfig

#: names of fields in files of older versions of transformers, and those of today
OLDER_NAMES = {
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_dropout_prob": "hidden_dropout",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}


class GptNeoxConfig(RotaryConfig):
    """``partial_rotary_factor`` is a quarter where a file does not say it."""

    name: ClassVar[str] = "gpt_neox"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"attention_bias": [True], "is_decoder": [False]}

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    hidden_act: str = "gelu"
    hidden_dropout: NonNegativeFloat = 0.0
    attention_dropout: NonNegativeFloat = 0.0
    layer_norm_eps: PositiveFloat = 1e-5
    partial_rotary_factor: PositiveFloat = 0.25
    use_parallel_residual: bool = True
    tie_word_embeddings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return {OLDER_NAMES.get(field, field): value for field, value in content.items()}

    def model(self) -> CausalTransformerModel:
        return CausalTransformerModel(
            **self.options(),
            norm="layer",
            mlp=mlp_of("hidden_act", self.hidden_act),
            biases=True,
            parallel_residual=self.use_parallel_residual,
            dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
        )
