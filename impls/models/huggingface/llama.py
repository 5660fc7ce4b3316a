"""Llama 1 to 3 (``LlamaForCausalLM``), and families with Llama's layers: Mistral (arXiv 2310.06825) with or
without a sliding window, Qwen2 and Qwen2.5 (arXiv 2407.10671) with biases of queries, keys and values, Qwen3
(arXiv 2505.09388) with normalised queries and keys. A file describes RoPE by ``rope_theta`` and
``rope_scaling``, or, from transformers 5 on, by ``rope_parameters``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import Config, SizedConfig, not_covered
from spbench.impls.models.hybrid import HybridModel

#: kinds of RoPE's scaling that change only angles, not shapes or costs; models here leave angles unscaled
ANGLES_ALONE = ("default", "linear", "dynamic", "llama3", "yarn")


class RotaryConfig(Config):
    """The fields of a family with RoPE.

    Attributes:
        rope_theta: the base of RoPE's angles.
        partial_rotary_factor: the share of a head's features that RoPE turns.
    """

    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: PositiveFloat = 1.0

    def options(self) -> dict[str, Any]:
        """The decoder's options from the fields; kv_heads and head_dim are None where they have the default
        that follows from other options."""
        said = self.said()
        heads = said["heads"]
        follow = {"kv_heads": heads, "head_dim": said["hidden"] / heads}
        return said | {name: None for name, value in follow.items() if said.get(name) == value}

    @model_validator(mode="before")
    @classmethod
    def _without_scaling(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        plain = dict(content)
        for field in ("rope_scaling", "rope_parameters"):
            given = plain.pop(field, None) or {}
            if not isinstance(given, Mapping):
                raise not_covered(field, given, "it must be a mapping")
            kind = given.get("rope_type", given.get("type", "default"))
            if kind not in ANGLES_ALONE:
                raise not_covered(f"{field}.rope_type", kind, f"it may be {', '.join(ANGLES_ALONE)}")
            for name in ("rope_theta", "partial_rotary_factor"):
                if name in given:
                    plain[name] = given[name]
        for name in ("rope_theta", "partial_rotary_factor"):
            if type(plain.get(name)) is int:  # JSON writes the float as 10000
                plain[name] = float(plain[name])
        return plain


class LlamaConfig(RotaryConfig, SizedConfig):
    """Llama's layers: grouped-query attention with RoPE, a gated MLP, an RMS norm before each, no biases."""

    name: ClassVar[str] = "llama"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "hidden_act": ["silu"],
        "attention_dropout": [0],
        "mlp_bias": [False],
        "attention_bias": [False],
    }

    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False

    def model(self) -> CausalTransformerModel:
        return CausalTransformerModel(**self.options() | self.family_options())

    def family_options(self) -> dict[str, Any]:
        """The model's options in which a family differs from Llama; {} for Llama itself."""
        return {}


LayerType = Literal["full_attention", "sliding_attention"]
#: the letters of :attr:`HybridModel.pattern`, by the kind of layer
_LETTERS: Mapping[LayerType, str] = {"full_attention": "S", "sliding_attention": "W"}


def letters_of(kinds: Sequence[LayerType] | None, layers: int, usual: str) -> str:
    """The letter of each layer, by ``layer_types``; by ``usual``, repeated, where a file has no types."""
    if kinds is None:
        return (usual * layers)[:layers]
    if len(kinds) != layers:
        raise not_covered("layer_types", kinds, f"there are {layers} layers")
    return "".join(_LETTERS[kind] for kind in kinds)


def repeated_pattern(letters: str) -> str:
    """The shortest pattern whose repetition gives these letters."""
    patterns = (letters[:n] for n in range(1, len(letters) + 1))
    return next(p for p in patterns if (p * len(letters))[: len(letters)] == letters)


class WindowedConfig(LlamaConfig):
    """Llama's layers, of which some or all may have a sliding window."""

    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: NonNegativeInt = 28
    layer_types: Sequence[LayerType] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_windows(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a file, without the fields of windows where ``use_sliding_window`` is off."""
        if content.get("use_sliding_window"):
            return dict(content)
        if "sliding_attention" in (content.get("layer_types") or ()):
            raise not_covered("layer_types", "sliding_attention", "use_sliding_window is off")
        of_windows = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
        return {field: value for field, value in content.items() if field not in of_windows}

    def model(self) -> CausalTransformerModel:
        model, layers = super().model(), self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return model
        first = self.max_window_layers
        usual = "S" * min(first, layers) + "W" * (layers - first)
        return windowed(model, letters_of(self.layer_types, layers, usual), self.sliding_window)


def windowed(model: CausalTransformerModel, letters: str, window: int) -> CausalTransformerModel:
    """The model with a window in the layers whose letter is W; ``letters`` has a letter for each layer."""
    if set(letters) == {"W"}:
        return replace(model, window=window)
    if "W" not in letters:
        return model
    options = {field.name: getattr(model, field.name) for field in fields(model)}
    return HybridModel(**{**options, "pattern": repeated_pattern(letters), "window": window})


class MistralConfig(LlamaConfig):
    """Mistral's layers: Llama's, by default with 8 heads of keys and values and a window of 4096."""

    name: ClassVar[str] = "mistral"

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096

    def model(self) -> CausalTransformerModel:
        return replace(super().model(), window=self.sliding_window)


class Qwen2Config(WindowedConfig):
    """Qwen2's layers: Llama's with biases of queries, keys and values; no window by default."""

    name: ClassVar[str] = "qwen2"

    def family_options(self) -> dict[str, Any]:
        return {"qkv_bias": True}


class Qwen3Config(WindowedConfig):
    """Qwen3's layers: Llama's with normalised queries and keys; by default no window and heads of 128
    features."""

    name: ClassVar[str] = "qwen3"

    head_dim: PositiveInt | None = 128

    def family_options(self) -> dict[str, Any]:
        return {"qk_norm": True}
