"""What FlashAttention's kernels allocate inside backward stands in a trace of a model that names them."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import trace_key
from spbench.impls.kernels.attention_buffers import inside_backward


@pytest.mark.parametrize(
    ("kernel", "heads", "nbytes"),
    [
        # a number a query, rounded up to 128; queries in float32; keys and values for each of 8 heads
        ("flash_attention_2", 2, [2 * 8 * 256 * 4, 2 * 8 * 256 * 96 * 4, *[2 * 8 * 200 * 80 * 2] * 2]),
        ("flash_attention_2", 8, [2 * 8 * 256 * 4, 2 * 8 * 256 * 96 * 4]),
        # two numbers a query; keys and values of 2 heads in float32
        ("flash_attention_3", 2, [*[2 * 8 * 256 * 4] * 2, 2 * 8 * 256 * 96 * 4, *[2 * 2 * 256 * 96 * 4] * 2]),
        ("flash_attention_3", 8, [*[2 * 8 * 256 * 4] * 2, 2 * 8 * 256 * 96 * 4]),
        ("flash", 2, []),
    ],
)
def test_bytes_by_hand(kernel: str, heads: int, nbytes: list[int]) -> None:
    assert inside_backward(kernel, (2, 8, 200, 80), (2, heads, 200, 80), 2) == nbytes


@pytest.mark.parametrize("strategy", ["single", "ulysses", "ring_attention"])
def test_they_are_in_a_trace_between_results_and_what_follows(strategy: str) -> None:
    sizes = {"sp": 2} if strategy != "single" else {}
    options = {"layers": 1, "heads": 4, "kv_heads": 2, "attention": "flash_attention_2"}
    asked = {"strategy": strategy, "sizes": sizes, "model_options": options, "precision": "bf16"}
    cell = Cell.model_validate({"model": "causal-transformer-tiny", "batch": 1, "seq_len": 512, **asked})
    other = cell.model_copy(update={"model_options": {**options, "attention": "flash"}})
    log, plain = tracing.trace(cell).memory, tracing.trace(other).memory
    added = len(log.sizes) - len(plain.sizes)
    backwards = 2 if strategy == "ring_attention" else 1  # rank 0 of 2 attends to one block, or to two
    assert added in (4, 4 * backwards)
    first = next(i for i, kind in log.tags.items() if kind == "workspaces" and log.sizes[i])
    at = log.events.index(first + 1)
    births, after = log.events[at : at + 4], log.events[at + 4 :]
    assert births == [first + n for n in (1, 2, 3, 4)]
    deaths = [*takewhile(lambda event: event < 0, after)]  # others may die then too
    assert {-n for n in births} <= {*deaths}


def test_a_model_that_names_no_kernel_has_those_of_its_card() -> None:
    """Two clusters whose cards run the same kernel share a trace; one whose file has no kernel has none."""
    options = {"layers": 1, "heads": 4, "kv_heads": 2, "attention": "flash"}
    asked = {"model": "causal-transformer-tiny", "strategy": "single", "batch": 1, "seq_len": 512}
    cells = {
        name: Cell.model_validate({**asked, "model_options": options, "cluster": name, "precision": "bf16"})
        for name in ("a100-sxm-80gb", "h100-sxm", "piz-daint-p100")
    }
    sizes = {name: tracing.trace(cell).memory.sizes for name, cell in cells.items()}
    keys = {name: trace_key(cell, 0, False) for name, cell in cells.items()}
    named = cells["h100-sxm"].model_copy(
        update={"model_options": {**options, "attention": "flash_attention_2"}}
    )
    assert sizes["h100-sxm"] == tracing.trace(named).memory.sizes
    assert len(sizes["a100-sxm-80gb"]) == len(sizes["h100-sxm"]) == len(sizes["piz-daint-p100"]) + 4
    assert keys["a100-sxm-80gb"] == keys["h100-sxm"] != keys["piz-daint-p100"]


def test_flash_attention_2_has_values_of_the_head_size_of_keys() -> None:
    """Latent attention of 2 sequences of 64 positions and 3 heads, 24 features a key and 20 a value: values,
    the output and their gradients take as much as keys, and the output's part is copied. In float32, and by
    kernels of two head sizes, they do not."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 8}
    options = {"layers": 1, "heads": 3, "hidden": 44, "inner": 36, **sizes}
    asked = {"model": "causal-transformer-tiny", "strategy": "single", "batch": 2, "seq_len": 64}

    def traced(kernel: str, precision: str = "bf16") -> Counter[int]:
        of_model = {"model_options": {**options, "attention": kernel}}
        return Counter(
            tracing.trace(Cell.model_validate({**asked, **of_model, "precision": precision})).memory.sizes
        )

    ours, two_sizes = traced("flash_attention_2"), traced("cudnn")
    wide = 2 * 3 * 64 * 24 * 2
    # values and the output with zeros, the gradients of both
    assert ours[wide] - two_sizes[wide] == 4
    assert traced("flash_attention_2", "fp32") == traced("cudnn", "fp32")
