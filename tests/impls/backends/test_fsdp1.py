"""PyTorch's first FSDP as one unit: streams, what is left alone, and what is held in which dtype."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from tests.measure.verify.assertions import assert_green

WIDE = {"layers": 2, "hidden": 192, "inner": 512, "vocabulary": 1024}


def asked(strategy: str, sizes: dict[str, int], **training: Any) -> Cell:
    return Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "model_options": WIDE,
            "strategy": strategy,
            "sizes": sizes,
            "batch": 1,
            "seq_len": 16,
            "precision": "bf16",
            "training": {"backend": "fsdp1", **training},
        }
    )


def of_size(log: MemoryLog, nbytes: int) -> list[tuple[int, str, str]]:
    """The stream of each storage of about that size (padding apart) that the step makes, and the phases of
    its birth and its death ("": it lives on)."""
    found = []
    for number, size in enumerate(log.sizes):
        born = log.events.index(number + 1)
        if 0 <= size - nbytes < 64 and born >= log.step_start:
            dies = -number - 1
            death = log.phase_of(log.events.index(dies)) if dies in log.events else ""
            found.append((log.streams[number], log.phase_of(born), death))
    return found


def test_the_unit_is_whole_from_forward_on_and_streams_are_apart() -> None:
    cell = asked("ulysses", {"sp": 2}, shard_dtype="parameters")
    log, elements = tracing.trace(cell).memory, model_parameters(cell)
    # the weights, and their gradient, of which the sum's part is made on a third stream
    assert of_size(log, 2 * elements) == [(1, "forward", "backward"), (0, "backward", "backward")]
    assert of_size(log, elements) == [(2, "backward", "")]


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4 + 8), ("parameters", 2 + 4)])
def test_shards_are_held_in_the_dtype_that_is_asked_for(dtype: str, nbytes: int) -> None:
    cell = asked("ulysses", {"sp": 2}, shard_dtype=dtype)
    held = tracing.trace(cell).measurement(None).peak_held
    assert held["optimizer_state"] == pytest.approx(nbytes * model_parameters(cell) / 2, rel=0.02)


def test_what_tensor_parallelism_splits_is_left_alone(pool: RankPool) -> None:
    cell = asked("megatron_sp", {"tp": 2}, shard_dtype="parameters")
    trace = tracing.trace(cell)
    split = 2 * (4 * 192 * 192 + 3 * 192 * 512) // 2  # of two layers, half on each rank
    assert trace.measurement(None).peak_held["parameters"] == pytest.approx(2 * split, rel=0.01)
    gathered = {row["collective"] for row in trace.communication.rows() if row["phase"] == "forward"}
    assert gathered == {"all_gather", "reduce_scatter"}
    model = model_preset("causal-transformer-tiny", {"layers": 1})
    assert_green(pool, Case(strategy_class("megatron_sp"), model, "model", backend="fsdp1"), 2)
