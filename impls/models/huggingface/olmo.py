"""OLMo 2 and 3 (arXiv 2501.00656): norms behind attention and MLP, and of queries and keys over all heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.llama import LayerType, LlamaConfig, letters_of, windowed


class Olmo2Config(LlamaConfig):
    """As Llama's, but for where norms stand."""

    name: ClassVar[str] = "olmo2"

    rms_norm_eps: PositiveFloat = 1e-5

    def family_options(self) -> dict[str, Any]:
        return {"norms": "behind", "qk_norm": True, "qk_norm_over": "all"}


class Olmo3Config(Olmo2Config):
    """As OLMo 2's, with a window in three of four layers where a file does not list them."""

    name: ClassVar[str] = "olmo3"

    rope_theta: PositiveFloat = 500_000.0
    sliding_window: PositiveInt = 4096
    layer_types: Sequence[LayerType] | None = None

    def model(self) -> CausalTransformerModel:
        letters = letters_of(self.layer_types, self.num_hidden_layers, "WWWS")
        return windowed(super().model(), letters, self.sliding_window)
