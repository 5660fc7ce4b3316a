"""Training steps of models on grids: closed form, virtual ranks and real ranks send the same bytes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Unsupported
from tests.measure.engines.real_ranks import assert_real_ranks_send_the_same
from tests.slow import slow

STRATEGIES = ("dsp", "ulysses", "megatron_sp", "ring_attention", "all_gather_kv", "tensor_parallel")


def cell_of(strategy: str, n: int, **changes: Any) -> Cell:
    sizes = strategy_class(strategy).sizes_for(n)
    options = {"model": "st-dit-tiny", "strategy": strategy, "sizes": sizes, "batch": 2, "seq_len": 24}
    return Cell.model_validate(options | changes)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("strategy", "n", "checkpointing"),
    [
        *((strategy, 3, True) for strategy in ("dsp", "ulysses", "megatron_sp")),
        slow("dsp", 4, False),
        *(slow(other, 3, True) for other in STRATEGIES[3:]),
    ],
)
def test_real_ranks_send_what_virtual_ones_do(
    pool: RankPool, strategy: str, n: int, checkpointing: bool
) -> None:
    """3 and 4 ranks do not divide the 2 places of a frame."""
    options = {"checkpointing": checkpointing, "layers": 1}
    cell = cell_of(strategy, n, precision="bf16", model_options=options)
    assert_real_ranks_send_the_same(pool, cell)


ST_DIT = "st-dit-tiny", {"temporal": 16, "patch": 4}, 16 * 4 * 16
CUBE = "transformer-3d-tiny", {"leading": (16, 16)}, 16**3


SHAPES = [(*ST_DIT, 1, 16, True), (*CUBE, 0, 8, False), (*ST_DIT, 0, 8, False), (*CUBE, 1, 16, True)]


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        # each strategy in one shape, each shape with some strategies; in the slow run all with all
        slow(strategy, shape) if (n - m) % 4 else (strategy, shape)
        for n, strategy in enumerate(STRATEGIES)
        for m, shape in enumerate(SHAPES)
    ],
)
def test_formula_is_what_virtual_ranks_send(strategy: str, shape: Any) -> None:
    model, options, seq_len, grid_dim, n, checkpointing = shape
    cell = cell_of(
        strategy,
        n,
        model=model,
        seq_len=seq_len,
        precision="fp16",
        model_options={**options, "heads": 16, "hidden": 32, "checkpointing": checkpointing},
        strategy_options={} if strategy == "tensor_parallel" else {"grid_dim": grid_dim},
    )
    measured = tracing.trace(cell, rank=n - 1).measurement(None)
    assert measured.formula_difference == []
    assert measured.communication


@pytest.mark.parametrize(("temporal", "spatial", "rank"), [(10, 6, 0), (7, 3, 3)])
def test_formula_pays_for_padding(rank: int, temporal: int, spatial: int) -> None:
    options = {"temporal": temporal, "layers": 1}
    cell = cell_of("dsp", 4, seq_len=temporal * spatial, model_options=options)
    assert tracing.trace(cell, rank).measurement(None).formula_difference == []


@pytest.mark.parametrize("backend", ["ddp", "fsdp_flat"])
def test_formula_with_replicas(backend: str) -> None:
    cell = cell_of("dsp", 2, sizes={"sp": 2, "dp": 2}, precision="bf16", training={"backend": backend})
    assert VirtualEngine().measure(cell).formula_difference == []


def inference(strategy: str, n: int, **changes: Any) -> Cell:
    return cell_of(strategy, n, precision="bf16", training={"step": "inference"}, **changes)


@pytest.mark.parametrize("strategy", ["dsp", "megatron_sp", "ring_attention"])
def test_inference_is_the_forward_of_a_training_step(strategy: str) -> None:
    """It sends what a forward does, and holds the weights and little else."""
    trained = VirtualEngine().measure(cell_of(strategy, 4, precision="bf16"))
    inferred = VirtualEngine().measure(inference(strategy, 4))
    assert inferred.formula_difference == []
    assert inferred.communication == [row for row in trained.communication if row["phase"] == "forward"]
    assert inferred.peak_memory_bytes is not None
    assert trained.peak_memory_bytes is not None
    assert inferred.peak_memory_bytes < trained.peak_memory_bytes / 3
    assert inferred.peak_held["parameters"] > 0
    assert not inferred.peak_held.get("gradients", 0) + inferred.peak_held.get("optimizer_state", 0)


def test_inference_on_real_ranks(pool: RankPool) -> None:
    assert_real_ranks_send_the_same(pool, inference("dsp", 3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"micro_batches": 2}, "no micro-batches"),
        ({"backend": "zero3"}, "no backend zero3"),
    ],
)
def test_inference_refuses_what_is_about_training(changes: dict[str, Any], reason: str) -> None:
    cell = cell_of("dsp", 2, training={"step": "inference", **changes})
    with pytest.raises(Unsupported, match=reason):
        VirtualEngine().measure(cell)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [3, 12])
def test_bytes_are_those_of_the_paper(n: int) -> None:
    """Section 3.3, of a layer of two dims forward, M elements in a grid: DSP 2 M/N and Ulysses 4 M/N, of
    which (N-1)/N leave the rank; Megatron-SP 8 M, an all-gather and a reduce-scatter each of attention along
    two dims, attention to the text and the MLP, of which (N-1)/N; Ring Attention 2 M, of which (N-1)/N."""
    grid = 2 * 12 * 24 * 24 * 4  # B T S H float32
    per_layer = {
        ("dsp", "all_to_all"): Fraction(2 * grid, n) * Fraction(n - 1, n),
        ("ulysses", "all_to_all"): Fraction(4 * grid, n) * Fraction(n - 1, n),
        ("ring_attention", "send"): 2 * grid * Fraction(n - 1, n),
    }
    for (strategy, collective), expected in per_layer.items():
        assert sent(strategy, n)["forward", collective] == expected
    by_blocks = sent("megatron_sp", n)
    both = by_blocks["forward", "all_gather"] + by_blocks["forward", "reduce_scatter"]
    assert both == 8 * grid * Fraction(n - 1, n)


def sent(strategy: str, n: int) -> dict[tuple[str, str], Fraction]:
    cell = cell_of(strategy, n, seq_len=12 * 24, model_options={"layers": 1})
    return tracing.trace(cell).communication.sent_bytes()
