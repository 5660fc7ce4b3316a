"""Training steps of the strategies that sequence parallelism is compared with: closed form, virtual ranks and
real ranks send the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.models.model import models
from tests.measure.engines.real_ranks import assert_real_ranks_send_the_same
from tests.slow import slow

STRATEGIES = {"ulysses": "sp", "megatron_sp": "tp", "ring_attention": "sp", "all_gather_kv": "sp"}
#: each strategy with models that it can run
PAIRS = [
    ("ulysses", "bert-tiny"),
    ("ulysses", "causal-transformer-tiny"),
    ("ulysses", "linear-transformer-tiny"),
    ("megatron_sp", "bert-tiny"),
    ("megatron_sp", "causal-transformer-tiny"),
    ("megatron_sp", "linear-transformer-tiny"),
    ("ring_attention", "causal-transformer-tiny"),
    ("ring_attention", "linear-transformer-tiny"),
    ("all_gather_kv", "causal-transformer-tiny"),
]
#: real ranks run the others in :mod:`tests.measure.engines.test_peaks`, without checkpointing
REALLY = [pair if pair[1] != "causal-transformer-tiny" else slow(*pair) for pair in PAIRS]


def cell_of(strategy: str, n: int, model: str, **changes: Any) -> Cell:
    options = {"model": model, "strategy": strategy, "sizes": {STRATEGIES[strategy]: n}, "batch": 3}
    return Cell.model_validate(options | {"seq_len": 24} | changes)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", [slow(False), True])
@pytest.mark.parametrize("n", [2, slow(3), slow(4)])
@pytest.mark.parametrize(("strategy", "model"), REALLY)
def test_real_ranks_send_what_virtual_ones_do(
    pool: RankPool, strategy: str, n: int, model: str, checkpointing: bool
) -> None:
    """Their peaks are compared elsewhere, for Gloo copies what it reduce-scatters."""
    cell = cell_of(strategy, n, model, precision="bf16", model_options={"checkpointing": checkpointing})
    assert_real_ranks_send_the_same(pool, cell)


def of_settings() -> Iterator[Any]:
    """Ranks, checkpointing and precision, of which two combinations are of every run."""
    for settings in product((2, 4, 8, 64), (False, True), ("fp16", "fp32", "fp64")):
        always = settings in ((2, True, "fp32"), (64, False, "fp16"))
        yield settings if always else slow(*settings)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("n", "checkpointing", "precision"), [*of_settings()])
@pytest.mark.parametrize(("strategy", "model"), PAIRS)
def test_formula_is_what_virtual_ranks_send(
    strategy: str, n: int, model: str, checkpointing: bool, precision: str
) -> None:
    options = {"heads": 64, "hidden": 128, "checkpointing": checkpointing}
    if hasattr(models()[model], "inner"):
        options["inner"] = 192
    cell = cell_of(strategy, n, model, seq_len=128, precision=precision, model_options=options)
    measured = tracing.trace(cell, rank=n - 1).measurement(None)
    assert measured.formula_difference == []
    assert measured.communication


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
    sizes = {STRATEGIES[strategy]: 2, "pp": 2, "dp": 2}
    cell = cell_of(strategy, 2, model, batch=4, sizes=sizes, precision="fp16")
    assert VirtualEngine().measure(cell).formula_difference == []


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_told_is_of_a_rank_that_sends(n: int) -> None:
    """The last rank of a ring sends no state forward, and may yet have the largest peak."""
    options = {"model": "tnl-tiny", "strategy": "lasp", "sizes": {"sp": n}, "batch": 3, "seq_len": 24}
    told = VirtualEngine().measure(Cell.model_validate(options))
    metered, planned = (
        sum(row["sent_bytes"] for row in rows if (row["phase"], row["collective"]) == ("forward", "send"))
        for rows in (told.communication, told.formula)
    )
    assert metered == planned > 0
