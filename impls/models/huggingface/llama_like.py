"""Families whose layers are Llama's but for one thing each: Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905),
Gemma (arXiv 2403.08295), Seed-OSS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.llama import LlamaConfig


class Phi3Config(LlamaConfig):
    """As Llama's; queries, keys and values are one projection, and so are an MLP's gate and its other input,
    which changes no size."""

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


class GemmaConfig(LlamaConfig):
    """As Llama's, with heads of 256 features, a gate by GELU and tied words; the embedding's factor, and the
    one that is added to the norms' weights, are left out."""

    name: ClassVar[str] = "gemma"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        **LlamaConfig.fixed,
        "hidden_act": ["gelu", "gelu_pytorch_tanh"],
        "hidden_activation": ["gelu_pytorch_tanh"],
    }

    head_dim: PositiveInt | None = 256
    tie_word_embeddings: bool = True

    def family_options(self) -> dict[str, Any]:
        return {"mlp": "geglu"}


class SeedOssConfig(LlamaConfig):
    """As Llama's, with biases of queries, keys and values. Dropout, which its files have and fine-tuning
    programs leave on, is left out."""

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
