"""Gemma 1 to 3 (arXiv 2403.08295, 2408.00118, 2503.19786): GELU gates, scaled embeddings, tied heads, and
from Gemma 2 on norms around attention and MLP, and windows. The 1 that Gemma adds to norms' weights is left
out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import WithImagesConfig
from spbench.impls.models.huggingface.llama import LayerType, LlamaConfig, letters_of, windowed
from spbench.impls.models.hybrid import HybridModel


class GemmaConfig(LlamaConfig):
    """Gemma's layers: Llama's, with heads of 256 features, a GELU gate, and a head tied to the embedding."""

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
    """Gemma 2's layers: Gemma's, with a cap on logits, and by default a window in every other layer. The
    model leaves out the cap on scores, which flash kernels apply, and their scale
    ``query_pre_attn_scalar``."""

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
        """The repeating letters of layers (W: window, S: none) for a file without ``layer_types``."""
        return "WS"


class Gemma3TextConfig(Gemma2Config):
    """Gemma 3's layers: Gemma 2's, with norms of queries and keys, no caps, and by default five layers with a
    window before each layer without one. Layers with a window have another base of RoPE."""

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
        """The fields with RoPE's two bases, which a file of transformers 5 lists by the kind of layer."""
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
    """Gemma 3 for text and images, of which the model has the text part."""

    name: ClassVar[str] = "gemma3"

    text_config: Gemma3TextConfig
