"""A step computes the same products by the layers of any library; attention by scores adds its own."""

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.simulator.program import ATTENTION
from spbench.bench.measure.trace.operator_prices import MATMULS
from spbench.impls.kernels.projection import TORCH_PRODUCTS, TRANSFORMER_ENGINE_PRODUCTS

B, L, Z, A, LAYERS = 2, 64, 12, 4, 2
#: FLOPs of one product of all queries with all keys, or of scores with values
SCORES = 2 * B * Z * L * L * A


def flops(backend: str = "ddp", **options: Any) -> tuple[float, float]:
    """FLOPs of a step of gpt3-tiny: of matmuls, and of attention kernels."""
    cell = Cell(
        model="gpt3-tiny",
        strategy="single",
        batch=B,
        seq_len=L,
        precision="bf16",
        model_options={"layers": LAYERS, **options},
        training={"backend": backend},
    )
    program = trace(cell, events=True).program
    of_attention = program.category == ATTENTION
    return float(program.flops[~of_attention].sum()), float(program.flops[of_attention].sum())


@pytest.mark.parametrize("backend", ["ddp", "megatron"])
def test_libraries_compute_the_same(backend: str) -> None:
    plain = flops()
    assert plain[1] > 0
    for library in ("megatron-local", "transformer-engine"):
        assert flops(backend, library=library, cross_entropy="in_place") == plain
        assert flops(backend, library=library, attention_dropout=0.1) == plain


def test_attention_by_scores_makes_six_products_of_all_pairs() -> None:
    (plain, _), (scored, _) = flops(), flops(library="megatron-local", attention="unfused")
    assert scored - plain == 6 * SCORES * LAYERS


def test_full_recomputation_repeats_the_forward_of_layers() -> None:
    once, again = flops(), flops(recompute="full")
    # 12 h^2 of a layer's weights, of the inner width 2 h of the tiny model 8 h^2
    assert again[0] - once[0] == 2 * B * L * LAYERS * 8 * (Z * A) ** 2


def test_every_product_has_its_flops() -> None:
    assert MATMULS.keys() >= TORCH_PRODUCTS | TRANSFORMER_ENGINE_PRODUCTS
