"""Qwen3 (``Qwen3ForCausalLM``, arXiv 2505.09388): Llama's layers with normalised queries and keys."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import PositiveInt

from spbench.impls.models.huggingface.windows import WindowedConfig


class Qwen3Config(WindowedConfig):
    """As Llama's; a sliding window is off unless ``use_sliding_window``, and heads have 128 features where a
    file does not say how many."""

    name: ClassVar[str] = "qwen3"

    head_dim: PositiveInt | None = 128

    def attention_options(self) -> dict[str, Any]:
        return {"qk_norm": True}
