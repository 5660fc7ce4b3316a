"""Steps of the strategies that sequence parallelism is compared with, on sequences and on grids: closed form,
virtual ranks and real ranks send the same bytes."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.models.model import models
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Unsupported
from tests.measure.engines.cells import assert_real_ranks_send_the_same
from tests.slow import slow

#: of sequences: each strategy with models that it can run
PAIRS = [
    *product(("ulysses", "megatron_sp"), ("bert-tiny", "causal-transformer-tiny", "linear-transformer-tiny")),
    *product(("ring_attention",), ("causal-transformer-tiny", "linear-transformer-tiny")),
    ("all_gather_kv", "causal-transformer-tiny"),
]
#: of which real ranks are of every run
ALWAYS = ("megatron_sp", "bert-tiny"), ("ring_attention", "linear-transformer-tiny")
#: of grids
STRATEGIES = ("dsp", "ulysses", "megatron_sp", "ring_attention", "all_gather_kv", "tensor_parallel")
GRID = "st-dit-tiny"


def cell_of(strategy: str, n: int, model: str = GRID, **changes: Any) -> Cell:
    sizes, batch = strategy_class(strategy).sizes_for(n), 2 if model == GRID else 3
    options = {"model": model, "strategy": strategy, "sizes": sizes, "batch": batch, "seq_len": 24}
    return Cell.model_validate(options | changes)


def real_cases() -> Iterator[Any]:
    """By default few: others are compared in :mod:`tests.measure.engines.test_peaks`. 3 and 4 ranks do not
    divide the 2 places of a frame."""
    for (strategy, model), n, kept in product(PAIRS, (2, 3, 4), (True, False)):
        always = (strategy, model) in ALWAYS and (n, kept) == (2, True)
        case = strategy, n, model, {"checkpointing": kept}
        yield case if always else slow(*case)
    for strategy in STRATEGIES:
        case = strategy, 3, GRID, {"checkpointing": True, "layers": 1}
        yield case if strategy == "dsp" else slow(*case)
    yield slow("dsp", 4, GRID, {"checkpointing": False, "layers": 1})


@pytest.mark.parametrize(("strategy", "n", "model", "options"), [*real_cases()])
def test_real_ranks_send_what_virtual_ones_do(
    pool: RankPool, strategy: str, n: int, model: str, options: dict[str, Any]
) -> None:
    """Their peaks are compared elsewhere, for Gloo copies what it reduce-scatters."""
    assert_real_ranks_send_the_same(
        pool, cell_of(strategy, n, model, precision="bf16", model_options=options)
    )


def of_settings() -> Iterator[Any]:
    """Ranks, checkpointing and precision, of which two combinations are of every run."""
    for settings in product((2, 4, 8, 64), (False, True), ("fp16", "fp32", "fp64")):
        always = settings in ((2, True, "fp32"), (64, False, "fp16"))
        yield settings if always else slow(*settings)


def check_formula(cell: Cell, rank: int) -> None:
    measured = tracing.trace(cell, rank=rank).measurement(None)
    assert measured.formula_difference == []
    assert measured.communication


@pytest.mark.covering(2)
@pytest.mark.parametrize(("n", "checkpointing", "precision"), [*of_settings()])
@pytest.mark.parametrize(("strategy", "model"), PAIRS)
def test_formula_is_what_virtual_ranks_send(
    strategy: str, n: int, model: str, checkpointing: bool, precision: str
) -> None:
    options = {"heads": 64, "hidden": 128, "checkpointing": checkpointing}
    if hasattr(models()[model], "inner"):
        options["inner"] = 192
    check_formula(
        cell_of(strategy, n, model, seq_len=128, precision=precision, model_options=options), rank=n - 1
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("ulysses", "bert-tiny"),
        ("megatron_sp", "bert-tiny"),
        ("ring_attention", "causal-transformer-tiny"),
        ("all_gather_kv", "causal-transformer-tiny"),
    ],
)
def test_formula_between_pipeline_stages_and_replicas(strategy: str, model: str) -> None:
    sizes = {**strategy_class(strategy).sizes_for(2), "pp": 2, "dp": 2}
    cell = cell_of(strategy, 2, model, batch=4, sizes=sizes, precision="fp16")
    assert VirtualEngine().measure(cell).formula_difference == []


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_told_is_of_a_rank_that_sends(n: int) -> None:
    """The last rank of a ring sends no state forward, and may yet have the largest peak."""
    told = VirtualEngine().measure(cell_of("lasp", n, "tnl-tiny"))
    metered, planned = (
        sum(row["sent_bytes"] for row in rows if (row["phase"], row["collective"]) == ("forward", "send"))
        for rows in (told.communication, told.formula)
    )
    assert metered == planned > 0


# -- grids ---------------------------------------------------------------------------------------------------

ST_DIT = GRID, {"temporal": 16, "patch": 4}, 16 * 4 * 16
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
def test_formula_of_grids_is_what_virtual_ranks_send(strategy: str, shape: Any) -> None:
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
    check_formula(cell, rank=n - 1)


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
