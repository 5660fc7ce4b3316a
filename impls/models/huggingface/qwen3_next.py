"""Qwen3-Next (``Qwen3NextForCausalLM``) and Qwen3.5: Gated DeltaNet in most layers, softmax attention with an
output gate in the others, and experts or an MLP in each layer."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from spbench.impls.models.huggingface.config import WithImagesConfig, not_covered
from spbench.impls.models.huggingface.llama import LlamaConfig, repeated_pattern
from spbench.impls.models.huggingface.mixtral import QwenExpertsConfig
from spbench.impls.models.hybrid import HybridModel

_LETTERS = {"linear_attention": "G", "full_attention": "S"}


class GatedDeltaConfig(LlamaConfig):
    """Layers of Gated DeltaNet, by default with softmax attention in one of ``full_attention_interval``."""

    head_dim: PositiveInt | None = 256
    partial_rotary_factor: PositiveFloat = 0.25
    full_attention_interval: PositiveInt = 4
    layer_types: Sequence[Literal["linear_attention", "full_attention"]] | None = None
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    linear_value_head_dim: PositiveInt = 128

    def family_options(self) -> dict[str, Any]:
        return {"qk_norm": True}

    def model(self) -> HybridModel:
        layers, every = self.num_hidden_layers, self.full_attention_interval
        kinds = self.layer_types
        if kinds is not None and len(kinds) != layers:
            raise not_covered("layer_types", kinds, f"there are {layers} layers")
        letters = "".join("S" if (i + 1) % every == 0 else "G" for i in range(layers))
        if kinds is not None:
            letters = "".join(_LETTERS[kind] for kind in kinds)
        plain = super().model()
        options = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return HybridModel(
            **options,
            pattern=repeated_pattern(letters),
            output_gate=True,
            state_heads=self.linear_num_value_heads,
            state_key_heads=self.linear_num_key_heads,
            key_size=self.linear_key_head_dim,
            value_size=self.linear_value_head_dim,
            convolution=self.linear_conv_kernel_dim,
        )


class GatedDeltaExpertsConfig(QwenExpertsConfig, GatedDeltaConfig):
    """The layers of :class:`GatedDeltaConfig` with routed experts and a gated shared expert."""

    num_experts: NonNegativeInt = 512
    num_experts_per_tok: PositiveInt = 10
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    norm_topk_prob: bool = True


class Qwen3NextConfig(GatedDeltaExpertsConfig):
    """Qwen3-Next's layers, all of which have experts."""

    name: ClassVar[str] = "qwen3_next"
    ignored: ClassVar[frozenset[str]] = frozenset(
        {*QwenExpertsConfig.ignored, "use_sliding_window", "max_window_layers"}
    )


#: ignored fields of Qwen3.5: of multi-token prediction, which transformers leaves out, and the states' dtype
_BESIDE = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"})


class Qwen35TextConfig(GatedDeltaConfig):
    """The layers of Qwen3.5 without experts: each has an MLP."""

    name: ClassVar[str] = "qwen3_5_text"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "attn_output_gate": [True],
        "mlp_only_layers": [[]],
    }
    ignored: ClassVar[frozenset[str]] = _BESIDE

    vocab_size: PositiveInt = 248_320


class Qwen35ExpertsTextConfig(GatedDeltaExpertsConfig):
    """The layers of Qwen3.5 with experts, all of which have experts."""

    name: ClassVar[str] = "qwen3_5_moe_text"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {**LlamaConfig.fixed, "attn_output_gate": [True]}
    ignored: ClassVar[frozenset[str]] = QwenExpertsConfig.ignored | _BESIDE

    vocab_size: PositiveInt = 248_320
    intermediate_size: PositiveInt = 512
    num_experts: NonNegativeInt = 256
    num_experts_per_tok: PositiveInt = 8


class Qwen35Config(WithImagesConfig):
    """Qwen3.5 for text and images, of which the model has the text part."""

    name: ClassVar[str] = "qwen3_5"

    text_config: Qwen35TextConfig


class Qwen35ExpertsConfig(WithImagesConfig):
    """Qwen3.5 with experts for text and images, of which the model has the text part."""

    name: ClassVar[str] = "qwen3_5_moe"

    text_config: Qwen35ExpertsTextConfig
