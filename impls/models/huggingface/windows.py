"""Sliding windows as Qwen's config.json has them: off unless ``use_sliding_window``, and then in the layers
that ``layer_types`` names, or in those from ``max_window_layers`` on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import not_covered
from spbench.impls.models.huggingface.llama import LlamaConfig
from spbench.impls.models.hybrid import HybridModel

#: letters of a hybrid's pattern
_LETTERS = {"full_attention": "S", "sliding_attention": "W"}


class WindowedConfig(LlamaConfig):
    """As Llama's, with windows in some layers or in all."""

    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: NonNegativeInt = 28
    layer_types: Sequence[Literal["full_attention", "sliding_attention"]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_windows(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """A file whose windows are off is one that does not speak of any."""
        if content.get("use_sliding_window"):
            return dict(content)
        if "sliding_attention" in (content.get("layer_types") or ()):
            raise not_covered("layer_types", "sliding_attention", "use_sliding_window is off")
        of_windows = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
        return {field: value for field, value in content.items() if field not in of_windows}

    def model(self) -> CausalTransformerModel:
        model, layers = super().model(), self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return model
        first = self.max_window_layers
        letters = "S" * min(first, layers) + "W" * (layers - first)
        if self.layer_types is not None:
            letters = "".join(_LETTERS[kind] for kind in self.layer_types)
            if len(letters) != layers:
                raise not_covered("layer_types", self.layer_types, f"there are {layers} layers")
        return windowed(model, letters, self.sliding_window)


def windowed(model: CausalTransformerModel, letters: str, window: int) -> CausalTransformerModel:
    """The model with that window in the layers whose letter is W: one for each layer."""
    if set(letters) == {"W"}:
        return replace(model, window=window)
    if "W" not in letters:
        return model
    repeated = (letters[:n] for n in range(1, len(letters) + 1))
    pattern = next(p for p in repeated if (p * len(letters))[: len(letters)] == letters)
    options = {field.name: getattr(model, field.name) for field in fields(model)}
    return HybridModel(**{**options, "pattern": pattern, "window": window})
