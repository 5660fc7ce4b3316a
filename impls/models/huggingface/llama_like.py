"""Families whose layers differ little from Llama's: Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905), GLM-4,
Seed-OSS, and OLMo 2 and 3 (arXiv 2501.00656)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.llama import LayerType, LlamaConfig, letters_of, windowed


class Phi3Config(LlamaConfig):
    """Phi-3's and Phi-4's layers, which have the sizes of Llama's. Phi makes queries, keys and values by one
    matmul, and the MLP's two opening projections by another."""

    name: ClassVar[str] = "phi3"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "embd_pdrop": [0],
        "resid_pdrop": [0],
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"original_max_position_embeddings"})

    sliding_window: PositiveInt | None = None

    def model(self) -> CausalTransformerModel:
        return replace(super().model(), window=self.sliding_window)


class GlmConfig(LlamaConfig):
    """GLM-4's layers: Llama's, by default with RoPE on half of a head and biases of queries, keys, values."""

    name: ClassVar[str] = "glm"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        field: values for field, values in LlamaConfig.fixed.items() if field != "attention_bias"
    }

    partial_rotary_factor: PositiveFloat = 0.5
    attention_bias: bool = True
    head_dim: PositiveInt | None = 128
    rms_norm_eps: PositiveFloat = 1.5625e-7

    def family_options(self) -> dict[str, Any]:
        return {"qkv_bias": self.attention_bias}


class Glm4Config(GlmConfig):
    """GLM-4-0414's layers: those of :class:`GlmConfig`, with norms before and behind attention and MLP."""

    name: ClassVar[str] = "glm4"

    def family_options(self) -> dict[str, Any]:
        return {**super().family_options(), "norms": "around"}


class SeedOssConfig(LlamaConfig):
    """Seed-OSS's layers: Llama's, with biases of queries, keys and values. The model leaves out dropout,
    though published files have it and fine-tuning programs keep it on."""

    name: ClassVar[str] = "seed_oss"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "attention_bias": [True],
        "attention_out_bias": [False],
        "attention_dropout": [0, 0.1],
        "residual_dropout": [0, 0.1],
    }

    head_dim: PositiveInt | None = 128

    def family_options(self) -> dict[str, Any]:
        return {"qkv_bias": True}


class Olmo2Config(LlamaConfig):
    """OLMo 2's layers: Llama's, with norms behind attention and MLP, and norms of queries and keys over all
    heads."""

    name: ClassVar[str] = "olmo2"

    rms_norm_eps: PositiveFloat = 1e-5

    def family_options(self) -> dict[str, Any]:
        return {"norms": "behind", "qk_norm": True, "qk_norm_over": "all"}


class Olmo3Config(Olmo2Config):
    """OLMo 3's layers: OLMo 2's, by default with a window in three of four layers."""

    name: ClassVar[str] = "olmo3"

    rope_theta: PositiveFloat = 500_000.0
    sliding_window: PositiveInt = 4096
    layer_types: Sequence[LayerType] | None = None

    def model(self) -> CausalTransformerModel:
        letters = letters_of(self.layer_types, self.num_hidden_layers, "WWWS")
        return windowed(super().model(), letters, self.sliding_window)
