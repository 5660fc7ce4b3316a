"""Mistral (``MistralForCausalLM``, arXiv 2310.06825): Llama's layers, with or without a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.llama import LlamaConfig


class MistralConfig(LlamaConfig):
    """As Llama's; a file that does not say so has 8 heads of keys and values, and a window."""

    name: ClassVar[str] = "mistral"

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096

    def model(self) -> CausalTransformerModel:
        return replace(super().model(), window=self.sliding_window)
