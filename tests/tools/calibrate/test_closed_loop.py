"""Predicted steps beside measured ones: the arithmetic, on made-up times. Calibration: planted scalars are
found again, and mistakes in what to fit are told in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell, Sizes
from spbench.bench.command_line.output import Output
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Calibration
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measurement import Measurement
from spbench.bench.tools.calibrate import closed_loop
from spbench.bench.tools.calibrate.closed_loop import ComparedCell, agreement, compared, predicted
from spbench.bench.tools.calibrate.compute_rates import SMALL, RatePoint
from spbench.bench.tools.calibrate.fit import Fit, Known, chosen, fitted, profile, residuals, summary
from spbench.bench.tools.calibrate.measured_cluster import cluster_of
from spbench.bench.tools.calibrate.operator_times import OPERATOR
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.selector import PublishedRow
from tests.terminal import screen_of
from tests.tools.calibrate.test_operator_times import machine


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


def known(size: int, compute_s: float, network_s: float, published: Calibration, noise: float = 1.0) -> Known:
    """A cell that computes and then communicates, and was published as under that calibration."""

    def simulator(c: Calibration) -> Any:
        seconds = compute_s / c.compute_efficiency + network_s / c.link_efficiency + c.step_overhead_s
        return SimpleNamespace(step_time_s=seconds)

    cell = Cell(model="bert-tiny", strategy="tensor_parallel", sizes=Sizes(tp=size), batch=8, seq_len=size)
    row = PublishedRow(1, {"size": str(size), "tokens": "1"})
    return Known(row, cell, simulator(published).step_time_s * noise, simulator)


TRUTH = Calibration(compute_efficiency=0.4, link_efficiency=0.25)
FITS = [Fit.parse("compute_efficiency:size=1"), Fit.parse("link_efficiency:size=2")]
TABLE = PublishedTable.model_validate(
    {
        "table": "made-up",
        "published": {"file": "none.csv"},
        "match": {"size": "parallel"},
        "quantities": {"tokens": {"field": "tokens_per_s"}},
    }
)


def test_planted_scalars_are_found() -> None:
    cells = [known(1, 1.0, 0.0, TRUTH), known(2, 0.5, 0.1, TRUTH), known(4, 0.25, 0.15, TRUTH)]
    found = fitted(FITS, cells)
    assert found.compute_efficiency == pytest.approx(0.4, rel=1e-9)
    assert found.link_efficiency == pytest.approx(0.25, rel=1e-9)
    assert found.fitted_on == [cells[0].cell.key, cells[1].cell.key]
    lines = residuals(FITS, cells, TABLE, "tokens")
    assert [line.role for line in lines] == ["calibrated", "calibrated", "held out"]
    assert lines[2].relative_error == pytest.approx(0, abs=1e-9)
    assert summary(lines) == "1 cells held out: median error 0.0%, worst 0.0%"
    copied = yaml.safe_load(screen_of(Output([profile(found, "fp16")]), 40))
    assert copied["calibration"]["fp16"]["fitted_on"] == found.fitted_on


def test_a_cost_is_found_too() -> None:
    cells = [known(1, 1.0, 0.0, Calibration(step_overhead_s=0.3))]
    assert fitted([Fit.parse("step_overhead_s:size=1")], cells).step_overhead_s == pytest.approx(
        0.3, rel=1e-9
    )


def test_fits_that_move_each_other_settle() -> None:
    """Every cell has all three costs, so no scalar can be fitted before the others."""
    truth = Calibration(compute_efficiency=0.4, link_efficiency=0.25, step_overhead_s=0.3)
    cells = [known(1, 0.1, 0.01, truth), known(2, 5.0, 0.02, truth), known(4, 0.2, 4.0, truth)]
    fits = ["step_overhead_s:size=1", "compute_efficiency:size=2", "link_efficiency:size=4"]
    found = fitted([Fit.parse(text) for text in fits], cells)
    assert found.scalars == pytest.approx(truth.scalars, rel=1e-3)


def test_rows_that_disagree_share_the_error_and_leaving_one_out_shows_it() -> None:
    cells = [known(1, 1.0, 0.0, TRUTH, 1.1), known(1, 2.0, 0.0, TRUTH, 1 / 1.1)]
    lines = residuals(FITS[:1], cells, TABLE, "tokens")
    assert lines[0].relative_error == pytest.approx(1 / 1.1 - 1)
    assert lines[1].relative_error == pytest.approx(0.1)
    assert lines[0].left_out == pytest.approx(math.pow(1.1, -2) - 1)
    assert summary(lines) == "no cell is held out: all were fitted on"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_eficiency:size=1", "unknown scalar 'compute_eficiency'; did you mean 'compute_efficiency'"),
        ("compute_efficiency", "write SCALAR:COLUMN=VALUE"),
        ("compute_efficiency:size", "write SCALAR:COLUMN=VALUE"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Fit.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute_efficiency:sise=1", "no column 'sise'; did you mean 'size'"),
        ("compute_efficiency:size=3", "no row with a published throughput has size=3"),
    ],
)
def test_rows_that_are_not_there(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(Fit.parse(text), [known(1, 1.0, 0.0, TRUTH)])
