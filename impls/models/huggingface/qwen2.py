"""Qwen2 and Qwen2.5 (``Qwen2ForCausalLM``, arXiv 2407.10671): Llama's layers with biases of queries, keys and
values."""

from __future__ import annotations

from typing import Any, ClassVar

from spbench.impls.models.huggingface.windows import WindowedConfig


class Qwen2Config(WindowedConfig):
    """As Llama's, whose sliding window is off unless ``use_sliding_window``."""

    name: ClassVar[str] = "qwen2"

    def attention_options(self) -> dict[str, Any]:
        return {"qkv_bias": True}
