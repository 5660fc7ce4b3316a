"""Sliding windows as Qwen's config.json has them: off unless ``use_sliding_window``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.impls.models.huggingface.config import not_covered

_FULL = "attention here is over the whole sequence"


def without_windows(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields but those of sliding windows.

    Raises:
        ValueError: a layer has one.
    """
    if content.get("use_sliding_window"):
        raise not_covered("use_sliding_window", True, _FULL)
    windowed = [kind for kind in content.get("layer_types") or () if kind != "full_attention"]
    if windowed:
        raise not_covered("layer_types", windowed[0], _FULL)
    of_windows = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return {field: value for field, value in content.items() if field not in of_windows}
