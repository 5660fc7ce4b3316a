"""Parameters of presets with experts beside published counts."""

from __future__ import annotations

import pytest

from spbench.impls.models.blocks.decoder import DecoderModel
from spbench.impls.models.model import model_preset

#: by preset: all parameters, and those that a token meets, where they are published and as they are rounded
PUBLISHED: dict[str, tuple[float, float | None, str]] = {
    "mixtral-8x7b": (46.7e9, 12.9e9, "mistral.ai/news/mixtral-of-experts"),
    "mixtral-8x22b": (140.6e9, 39.1e9, "huggingface.co/mistralai/Mixtral-8x22B-v0.1: 141B, 39B active"),
    "qwen3-30b-a3b": (30.5e9, 3.3e9, "huggingface.co/Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": (235e9, 22e9, "huggingface.co/Qwen/Qwen3-235B-A22B"),
    "gpt-oss-20b": (20.91e9, None, "arXiv 2508.10925, table 1"),
    "gpt-oss-120b": (116.83e9, None, "arXiv 2508.10925, table 1"),
    "qwen3-next-80b-a3b": (80e9, None, "huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "nemotron-3-nano-30b-a3b": (31.6e9, 3.6e9, "huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    # the model with its images has 109B
    "llama4-scout": (107.8e9, 17e9, "huggingface.co/meta-llama/Llama-4-Scout-17B-16E: 109B, 17B active"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    model = model_preset(name)
    assert isinstance(model, DecoderModel)
    published, active, _ = PUBLISHED[name]
    counts = model.parameters(model.padded_vocabulary(1))
    assert counts["elements"] == pytest.approx(published, rel=5e-3)
    if active is not None:
        others = counts["elements"] - counts["experts"]
        met = others + counts["experts"] * model.experts_per_token / model.experts
        assert met == pytest.approx(active, rel=0.02)
