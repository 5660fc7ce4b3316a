"""Qwen3 (``Qwen3ForCausalLM``, arXiv 2505.09388): Llama's layers with normalised queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt, model_validator

from spbench.impls.models.huggingface.llama import LlamaConfig
from spbench.impls.models.huggingface.windows import without_windows


class Qwen3Config(LlamaConfig):
    """As Llama's; a sliding window is off unless ``use_sliding_window``, and heads have 128 features where a
    file does not say how many."""

    name: ClassVar[str] = "qwen3"

    head_dim: PositiveInt | None = 128

    @model_validator(mode="before")
    @classmethod
    def _without_windows(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return without_windows(content)

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm": True}
