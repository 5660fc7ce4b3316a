"""Gemma 1 to 3 (arXiv 2403.08295, 2408.00118, 2503.19786): gates by GELU, scaled and tied words, and from
Gemma 2 on norms around attention and MLP, and windows. What is added to the norms' weights is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import WithImagesConfig
from spbench.impls.models.huggingface.llama import LayerType, LlamaConfig, letters_of, windowed
from spbench.impls.models.hybrid import HybridModel


class GemmaConfig(LlamaConfig):
    """Gemma's layers: Llama's, with heads of 256 features, a gate by GELU and tied words."""

    name: ClassVar[str] = "gemma"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "hidden_act": ["gelu", "gelu_pytorch_tanh"],
        "hidden_activation": ["gelu_pytorch_tanh"],
    }

    head_dim: PositiveInt | None = 256
    tie_word_embeddings: bool = True

    def family_options(self) -> dict[str, Any]:
        return {"mlp": "tanh_geglu", "embedding_scaled": True}


class Gemma2Config(GemmaConfig):
    """With a window in every other layer where a file does not list them, and caps on scores and logits.

    Left out: the cap on scores, which flash kernels apply; ``query_pre_attn_scalar``, their scale.
    """

    name: ClassVar[str] = "gemma2"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **GemmaConfig.fixed,
        "use_bidirectional_attention": [False],
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"attn_logit_softcapping", "cache_implementation", "query_pre_attn_scalar"}
    )

    final_logit_softcapping: PositiveFloat | None = 30.0
    sliding_window: PositiveInt = 4096
    layer_types: Sequence[LayerType] | None = None

    def family_options(self) -> dict[str, Any]:
        cap = self.final_logit_softcapping or 0.0
        return {**super().family_options(), "norms": "around", "logit_cap": cap}

    def model(self) -> CausalTransformerModel:
        letters = letters_of(self.layer_types, self.num_hidden_layers, self.usual_letters())
        return windowed(super().model(), letters, self.sliding_window)

    def usual_letters(self) -> str:
        """The letters of the layers where a file does not list them, again and again."""
        return "WS"


class Gemma3TextConfig(Gemma2Config):
    """With norms of queries and keys, without caps, and another base of RoPE in layers with a window, five of
    which stand before each layer without one."""

    name: ClassVar[str] = "gemma3_text"
    ignored: ClassVar[frozenset[str]] = Gemma2Config.ignored | {"mm_tokens_per_image"}

    vocab_size: PositiveInt = 262_208
    rope_theta: PositiveFloat = 1_000_000.0
    rope_local_base_freq: PositiveFloat = 10_000.0
    sliding_window_pattern: PositiveInt = 6
    final_logit_softcapping: PositiveFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_kind(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """A file of transformers 5 gives RoPE by the kind of layer."""
        plain = dict(content)
        if type(plain.get("rope_local_base_freq")) is int:
            plain["rope_local_base_freq"] = float(plain["rope_local_base_freq"])
        given = plain.get("rope_parameters")
        if not isinstance(given, Mapping) or not {*given} & {"full_attention", "sliding_attention"}:
            return plain
        for kind, field in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
            of_kind = given.get(kind)
            if isinstance(of_kind, Mapping) and isinstance(of_kind.get("rope_theta"), int | float):
                plain[field] = float(of_kind["rope_theta"])
        return plain | {"rope_parameters": given.get("full_attention")}

    def family_options(self) -> dict[str, Any]:
        return {**super().family_options(), "qk_norm": True}

    def usual_letters(self) -> str:
        return "W" * (self.sliding_window_pattern - 1) + "S"

    def model(self) -> CausalTransformerModel:
        model = super().model()
        if isinstance(model, HybridModel):
            return replace(model, window_rotary_base=self.rope_local_base_freq)
        return model if model.window is None else replace(model, rotary_base=self.rope_local_base_freq)


class Gemma3Config(WithImagesConfig):
    """Gemma 3 of text and images."""

    name: ClassVar[str] = "gemma3"

    text_config: Gemma3TextConfig
