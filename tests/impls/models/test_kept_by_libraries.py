"""What a layer keeps for backward, bytes a token, against counts from the libraries' public code."""

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace


def kept_by_a_layer(**cell: Any) -> int:
    """Bytes that forward leaves behind for one more layer of the first rank."""

    def kept(layers: int) -> int:
        options = {**cell["model_options"], "layers": layers, "vocabulary": 128}
        log = trace(Cell(**{**cell, "precision": "bf16", "model_options": options})).memory
        (forward,) = (span for name, span in log.spans() if name == "forward")
        changes = log.signed_bytes()[forward]
        return int(changes.sum())

    return kept(3) - kept(2)


L = 1024
SMALL: dict[str, Any] = {
    "hidden": 512,
    "heads": 8,
    "inner": 2048,
    "library": "megatron-local",
    "attention": "unfused",
}


def test_llama_3_by_transformer_engine() -> None:
    # norm input and output twice, q, k, v after RoPE, attention's output, fc1's and SwiGLU's outputs in bf16;
    # a float32 a head and a norm
    expected = 4 * 2 * 8192 + 2 * 8192 + 4 * 8 * 128 + 2 * 8192 + 4 * 64 + 2 * 4 + 6 * 28672
    cell = {"model": "llama3-70b", "strategy": "single", "batch": 1, "seq_len": L}
    options = {"library": "transformer-engine", "cross_entropy": "in_place"}
    assert kept_by_a_layer(**cell, model_options=options) == L * expected == L * 274_696


@pytest.mark.parametrize(("attention", "outputs"), [("flash", 2), ("cudnn", 1)])
def test_gpt_with_dropout_and_flash_attention(attention: str, outputs: int) -> None:
    # Megatron-LM's gpt3_7b_tp4 on A100 (64,560) and on H100 (62,512)
    h, kv = 4096, 8 * 128
    expected = (
        8 * h + 2 * (h + 2 * kv) // 4 + outputs * 2 * h // 4 + 4 * 32 // 4 + 2 * h + 4 * 4 * h // 4 + 16
    )
    options = {"library": "transformer-engine", "attention": attention, "kv_heads": 8}
    cell = {"model": "gpt3-7b", "strategy": "tensor_parallel", "sizes": {"tp": 4}, "batch": 2, "seq_len": L}
    assert kept_by_a_layer(**cell, model_options=options) == 2 * L * expected


def test_gpt_with_dropout_and_scores() -> None:
    # 10 h + 24 h / tp + 5 L heads / tp, and two float32 a norm
    h, heads = SMALL["hidden"], SMALL["heads"]
    cell = {"model": "gpt3-345m", "strategy": "tensor_parallel", "sizes": {"tp": 2}, "batch": 2, "seq_len": L}
    expected = 10 * h + 24 * h // 2 + 5 * L * heads // 2 + 16
    assert kept_by_a_layer(**cell, model_options=SMALL) == 2 * L * expected


def test_selective_recomputation_keeps_no_scores() -> None:
    h = SMALL["hidden"]
    cell = {"model": "gpt3-345m", "strategy": "single", "batch": 1, "seq_len": L}
    kept = kept_by_a_layer(**cell, model_options=SMALL | {"recompute": "selective"})
    assert kept == L * (10 * h + 24 * h + 16)


def test_full_recomputation_keeps_the_input_of_each_run() -> None:
    options = {"hidden": 512, "heads": 8, "inner": 2048, "recompute": "full"}
    cell = {"model": "gpt3-345m", "strategy": "single", "batch": 1, "seq_len": L}
    assert kept_by_a_layer(**cell, model_options=options) == L * 2 * 512


def test_hugging_faces_layers_keep_cos_and_sin_of_their_own() -> None:
    # cos and sin of A features each in bf16, once a layer for queries and keys together
    cell = {"model": "causal-transformer-1b", "strategy": "single", "batch": 2, "seq_len": L}
    shared, own = (kept_by_a_layer(**cell, model_options={"rope": rope}) for rope in ("shared", "each_layer"))
    assert own - shared == L * 2 * 2 * 128
