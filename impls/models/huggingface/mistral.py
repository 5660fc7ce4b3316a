"""Mistral (``MistralForCausalLM``, arXiv 2310.06825): Llama's layers, with or without a sliding window."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt, field_validator

from spbench.impls.models.huggingface.config import not_covered
from spbench.impls.models.huggingface.llama import LlamaConfig


class MistralConfig(LlamaConfig):
    """As Llama's, with eight heads of keys and values where it does not say how many."""

    name: ClassVar[str] = "mistral"

    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = None

    @field_validator("sliding_window")
    @classmethod
    def _none(cls, window: int | None) -> int | None:
        if window is not None:
            why = f"attention here is over all positions, the same up to {window} of them; set it to null"
            raise not_covered("sliding_window", window, why)
        return window
