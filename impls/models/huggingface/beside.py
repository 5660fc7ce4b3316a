"""Families whose attention and MLP take the same input: Phi-1.5 and Phi-2 (arXiv 2309.05463) and Falcon-7B
(arXiv 2311.16867), with one norm before both; GPT-NeoX and Pythia (``GPTNeoXForCausalLM``, arXiv 2204.06745),
with a norm before each, and RoPE on a share of each head.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import SizedConfig
from spbench.impls.models.huggingface.gpt2 import mlp_of
from spbench.impls.models.huggingface.llama import RotaryConfig

#: the options that Phi and Falcon share
_LAYERS: Mapping[str, Any] = {"norm": "layer", "norms": "shared", "parallel_residual": True}


class PhiConfig(RotaryConfig):
    """Phi-1.5's and Phi-2's layers, with biases. The model leaves out dropout and the head's bias."""

    name: ClassVar[str] = "phi"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "hidden_act": ["gelu_new"],
        "qk_layernorm": [False],
        "embd_pdrop": [0],
        "attention_dropout": [0],
        "resid_pdrop": [0, 0.1],
    }

    vocab_size: PositiveInt = 51200
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 8192
    num_hidden_layers: PositiveInt = 24
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    layer_norm_eps: PositiveFloat = 1e-5
    partial_rotary_factor: PositiveFloat = 0.5
    tie_word_embeddings: bool = False

    def model(self) -> CausalTransformerModel:
        return CausalTransformerModel(**self.options(), **_LAYERS, biases=True, mlp="gelu")


class FalconConfig(RotaryConfig):
    """Falcon-7B's layers: no biases, one head of keys and values, a head tied to the word embedding."""

    name: ClassVar[str] = "falcon"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "activation": ["gelu"],
        "alibi": [False],
        "attention_dropout": [0],
        "bias": [False],
        "hidden_dropout": [0],
        "multi_query": [True],
        "new_decoder_architecture": [False],
        "parallel_attn": [True],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"apply_residual_connection_post_layernorm", "num_kv_heads"}
    )

    vocab_size: PositiveInt = 65024
    hidden_size: PositiveInt = 4544
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 71
    ffn_hidden_size: PositiveInt | None = None
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True

    def model(self) -> CausalTransformerModel:
        inner = self.ffn_hidden_size or 4 * self.hidden_size
        return CausalTransformerModel(**self.options(), **_LAYERS, mlp="erf_gelu", kv_heads=1, inner=inner)


#: today's names of fields, by the names in files of older versions of transformers
OLDER_NAMES = {
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_dropout_prob": "hidden_dropout",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}


class GptNeoxConfig(RotaryConfig, SizedConfig):
    """GPT-NeoX's and Pythia's layers, by default with RoPE on a quarter of each head."""

    name: ClassVar[str] = "gpt_neox"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {"attention_bias": [True], "is_decoder": [False]}

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
