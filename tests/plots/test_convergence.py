"""The figure of loss curves: lines are the losses, and below them their deviations."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from bench.cell import Cell
from bench.compare import as_frame, compare
from bench.narrowing import Narrowing, declared_cells
from bench.scenario import load_scenario
from plots.convergence import convergence_figure, draw
from plots.style import house_style
from tests.plots.drawn import artists, assert_nothing_overlaps, assert_valid, legend, points

Row = dict[str, Any]
SCENARIO = load_scenario("rsa_convergence")
CELLS = declared_cells(SCENARIO, Narrowing())
RSA = "ring self attention on 4 ranks, fp32"


def row(cell: Cell) -> Row:
    off = {"ring_self_attention": 1e-4, "tensor_parallel": 1e-7}.get(cell.strategy, 0.0)
    losses = [{"step": step, "mlm": 7 / step * (1 + off * (step - 1)), "order": 0.7} for step in range(1, 40)]
    return {
        "key": cell.key,
        "cell": cell.model_dump(mode="json"),
        "status": "ok",
        "reason": "",
        "measurement": {"losses": losses},
    }


@pytest.fixture
def rows() -> list[Row]:
    return [row(cell) for cell in CELLS]


def drawn(rows: list[Row]) -> Figure:
    comparison = as_frame(compare(SCENARIO, CELLS, {r["key"]: r for r in rows}))
    with house_style():
        figure = convergence_figure(rows, comparison)
        assert_nothing_overlaps(figure)
    return figure


def test_curves_and_deviations(rows: list[Row]) -> None:
    figure = drawn(rows)
    assert points(figure, f"mlm {RSA}")[:2] == [(1, 7.0), (2, pytest.approx(3.50035))]
    deviation = points(figure, f"deviation mlm {RSA}")
    assert deviation[0] == (1, 1e-9)  # none, drawn at the foot of the axis
    assert deviation[1:3] == [(2, pytest.approx(1e-4)), (3, pytest.approx(2e-4))]
    assert set(legend(figure)) == {
        "one device, fp32",
        "one device, fp64",
        "tensor parallel on 4 ranks, fp32",
        RSA,
    }
    assert not artists(figure, "deviation mlm one device, fp32")
    (notes,) = artists(figure, "notes")
    assert "ring self-attention: largest deviation, mlm 0.0038" in notes.get_text()


def test_runs_without_losses_are_told(rows: list[Row]) -> None:
    rows[0] |= {"status": "failed", "reason": "a reason", "measurement": {}}
    figure = drawn(rows)
    assert "bert-mini, single, fp32: failed at 1 GPUs (a reason)" in artists(figure, "notes")[0].get_text()
    # the other one-device run takes its place
    assert not artists(figure, "deviation mlm one device, fp64")
    assert points(figure, f"deviation mlm {RSA}")


def test_files(rows: list[Row], tmp_path: Path) -> None:
    for name, some in (("all", rows), ("one", rows[2:3]), ("none", [])):
        folder = tmp_path / name
        assert_valid(draw(some, pd.DataFrame(), folder), folder, "convergence")
