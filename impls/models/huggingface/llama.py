"""Llama 1 to 3 (``LlamaForCausalLM``), and what other families with its layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.rotary import RotaryConfig


class LlamaConfig(RotaryConfig):
    """Pre-norm layers of grouped-query attention with RoPE and a gated MLP; RMS norms, no biases."""

    name: ClassVar[str] = "llama"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "hidden_act": ["silu"],
        "attention_dropout": [0],
        "mlp_bias": [False],
        "attention_bias": [False],
    }

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False

    def model(self) -> CausalTransformerModel:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        return CausalTransformerModel(
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=None if kv_heads == heads else kv_heads,
            head_dim=None if self.head_dim == self.hidden_size / heads else self.head_dim,
            inner=self.intermediate_size,
            vocabulary=self.vocab_size,
            tied=self.tie_word_embeddings,
            norm_epsilon=self.rms_norm_eps,
            rotary_base=self.rope_theta,
            rotary_share=self.partial_rotary_factor,
            **self.attention_options(),
        )

    def attention_options(self) -> dict[str, Any]:
        """What a family's attention has beside Llama's."""
        return {}
