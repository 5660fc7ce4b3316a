"""The timeline's order against real ranks: the arithmetic, on made-up times."""

from __future__ import annotations

import math

import pytest

from spbench.bench.calibration.compute_rates import SMALL
from spbench.bench.calibration.measured_cluster import cluster_of
from spbench.bench.cell import Cell, Sizes
from spbench.bench.provenance import provenance
from tests.bench.calibration.machines import machine
from tests.benchmarks.timeline_order import (
    Compared,
    agreement,
    as_frame,
    cells,
    compared,
    simulated,
)


def row(measured: float, simulated: float, seq_len: int = 128, spread: float = 0.0) -> Compared:
    cell = Cell(model="bert-mini", strategy="single", batch=2, seq_len=seq_len)
    parts = {f"{name}_s": 0.0 for name in ("compute", "overhead", "exposed_communication", "bubble")}
    samples = [measured - spread, measured, measured + spread]
    return compared(cell, samples, {"step_time_s": simulated, **parts})


def test_order_and_errors() -> None:
    # 2 and 3 are the wrong way round, and their samples overlap; the other shape is far away
    rows = [row(1, 1), row(2, 6, spread=0.6), row(3, 4, spread=0.6), row(100, 50, seq_len=256)]
    found = agreement(rows)
    assert found.rank_correlation == pytest.approx(0.8)  # 1 - 6 sum d^2 / (n (n^2 - 1)), d = 0, 1, -1, 0
    assert (found.pairs, found.pairs_alike) == (3, 2)
    assert (found.clear_pairs, found.clear_pairs_alike) == (2, 2)
    assert found.worst_error == pytest.approx(2.0)
    assert found.median_error == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert str(found).startswith("rank correlation 0.80; of pairs of one shape 2 of 3 in the measured order")


def test_a_reversed_order_is_seen() -> None:
    assert agreement([row(1, 3), row(2, 2), row(3, 1)]).rank_correlation == pytest.approx(-1)


def test_the_cells_have_each_strategy_on_each_number_of_ranks() -> None:
    chosen = list(cells())
    assert len({cell.key for cell in chosen}) == len(chosen) == 15
    assert {(cell.strategy, cell.sizes.world) for cell in chosen} == {
        ("single", 1),
        *((name, n) for name in ("tensor_parallel", "ring_self_attention") for n in (2, 4)),
    }


def test_a_cell_is_simulated_with_the_rates_given_and_says_where_they_are_from() -> None:
    cell = SMALL.model_copy(
        update={"strategy": "ring_self_attention", "sizes": Sizes(sp=2), "engine": "distributed"}
    )
    slow, quick = (cluster_of(machine(step_s=step), "local", "measured") for step in (200.0, 100.0))
    found, less = simulated(cell, slow), simulated(cell, quick)
    assert found["overhead_s"] == pytest.approx(2 * less["overhead_s"])
    assert found["step_time_s"] > found["overhead_s"] > 100
    frame = as_frame([compared(cell, [1.0, 3.0, 2.0], found)], {2: slow})
    assert (frame["measured_s"][0], frame["measured_most_s"][0], frame["launch_overhead_s"][0]) == (2, 3, 2)
    assert math.isclose(frame["simulated_s"][0], found["step_time_s"], rel_tol=1e-6)
    assert frame["torch"][0] == provenance()["torch"]
