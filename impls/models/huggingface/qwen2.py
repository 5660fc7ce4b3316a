"""Qwen2 and Qwen2.5 (``Qwen2ForCausalLM``, arXiv 2407.10671): Llama's layers with biases of queries, keys and
values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from spbench.impls.models.huggingface.llama import LlamaConfig
from spbench.impls.models.huggingface.windows import without_windows


class Qwen2Config(LlamaConfig):
    """As Llama's, whose sliding window is off unless ``use_sliding_window``."""

    name: ClassVar[str] = "qwen2"

    @model_validator(mode="before")
    @classmethod
    def _without_windows(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        return without_windows(content)

    def attention_options(self) -> dict[str, Any]:
        return {"qkv_bias": True}
