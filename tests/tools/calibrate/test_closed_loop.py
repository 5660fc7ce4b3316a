"""Predicted steps beside measured ones: the arithmetic, on made-up times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measurement import Measurement
from spbench.bench.tools.calibrate import closed_loop
from spbench.bench.tools.calibrate.closed_loop import ComparedCell, agreement, compared, predicted
from spbench.bench.tools.calibrate.compute_rates import SMALL, RatePoint
from spbench.bench.tools.calibrate.measured_cluster import cluster_of
from spbench.bench.tools.calibrate.operator_times import OPERATOR
from tests.tools.calibrate.machines import machine


def row(measured: float, simulated: float, seq_len: int = 128, spread: float = 0.0) -> ComparedCell:
    cell = Cell(model="bert-mini", strategy="single", batch=2, seq_len=seq_len)
    parts = {f"{name}_s": 0.0 for name in ("compute", "overhead", "exposed_communication", "bubble")}
    samples = [measured - spread, measured, measured + spread]
    return compared(cell, samples, {"step_time_s": simulated, **parts})


def test_order_and_errors() -> None:
    # 2 and 3 are the wrong way round, and their samples overlap; the other shape is far away
    found = agreement([row(1, 1), row(2, 6, spread=0.6), row(3, 4, spread=0.6), row(100, 50, seq_len=256)])
    assert found.tau == pytest.approx(4 / 6)  # five of six pairs alike, one not
    assert (found.clear_pairs, found.clear_pairs_alike) == (2, 2)
    assert found.worst_error == pytest.approx(2.0)
    assert found.median_error == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert str(found).startswith("error: median 42%, worst 200%; Kendall's tau 0.67; of pairs")


def test_a_reversed_order_is_seen() -> None:
    found = agreement([row(1, 3), row(2, 2), row(3, 1)])
    assert found.tau == pytest.approx(-1)
    assert (found.clear_pairs, found.clear_pairs_alike) == (3, 0)


def test_the_cells_have_each_strategy_on_each_number_of_ranks() -> None:
    chosen = load_scenario("closed_loop").cells[""]
    assert len({cell.key for cell in chosen}) == len(chosen) == 15
    assert {(cell.strategy, cell.sizes.world) for cell in chosen} == {
        ("single", 1),
        *((name, n) for name in ("tensor_parallel", "ring_self_attention") for n in (2, 4)),
    }


def test_the_figures_time_a_cell() -> None:
    cell = SMALL.model_copy(update={"strategy": "ring_self_attention", "sizes": Sizes(sp=2)})
    plain = machine(step_s=200.0)
    quick = cluster_of(machine(step_s=100.0), "local", "measured")
    found, less = predicted(cell, cluster_of(plain, "local", "measured")), predicted(cell, quick)
    assert found["overhead_s"] == pytest.approx(2 * less["overhead_s"])
    assert found["step_time_s"] > found["overhead_s"] > 100
    norms = RatePoint(OPERATOR + "layer_norm", "", 4096, "fp32", 2, [1e6], nbytes=4096)
    slow = cluster_of(replace(plain, points=[*plain.points, norms]), "local", "measured")
    # one of the embeddings, two of each layer, one of the head
    assert predicted(cell, slow)["compute_s"] - found["compute_s"] == pytest.approx(6e6, rel=0.01)


def test_cells_are_measured_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    def measure(self: Any, cell: Cell) -> Measurement:
        order.append(cell.batch)
        return Measurement(step_time_samples_s=[float(len(order))])

    monkeypatch.setattr(closed_loop.DistributedEngine, "measure", measure)
    cells = [SMALL.model_copy(update={"batch": n}) for n in (1, 2)]
    assert closed_loop.measured_samples(cells) == [[1.0, 3.0], [2.0, 4.0]]
    assert order == [1, 2, 1, 2]
