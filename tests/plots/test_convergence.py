"""The figure of loss curves: lines are the losses, and below them their deviations."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from spbench.bench.cell import Cell
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.tools.papers.answer import compare, load_scenario
from spbench.bench.tools.papers.comparison import as_frame
from spbench.plots.convergence import draw
from tests.plots.drawn import artists, assert_nothing_overlaps, legend, points
from tests.plots.drawn import drawn as drawn_by
from tests.plots.rows import ran, row_of

Row = dict[str, Any]
SCENARIO = load_scenario("rsa_convergence")
CELLS = declared_cells(SCENARIO, Narrowing())
RSA = "ring self attention on 4 ranks, fp32"


def row(cell: Cell) -> Row:
    off = {"ring_self_attention": 1e-4, "tensor_parallel": 1e-7}.get(cell.strategy, 0.0)
    losses = [{"step": step, "mlm": 7 / step * (1 + off * (step - 1)), "order": 0.7} for step in range(1, 40)]
    return row_of(cell, {"losses": losses})


@pytest.fixture
def rows() -> list[Row]:
    return [row(cell) for cell in CELLS]


def drawn(rows: list[Row]) -> Figure:
    comparison = as_frame(compare(SCENARIO, CELLS, {r["key"]: r for r in rows}))
    return drawn_by(draw, rows, comparison)


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
    assert "bert-mini, one device, fp32: failed (a reason)" in artists(figure, "notes")[0].get_text()
    # the other one-device run takes its place
    assert not artists(figure, "deviation mlm one device, fp64")
    assert points(figure, f"deviation mlm {RSA}")


def learned(strategy: str, backend: str, off: float, precision: str = "fp32") -> Row:
    losses = [{"step": step, "language": 7 / step * (1 + off * (step - 1))} for step in range(1, 40)]
    cell = {
        "model": "tnl-mini",
        "strategy": strategy,
        "sizes": {"sp": 4 if strategy == "lasp" else 1},
        "precision": precision,
        "training": {"backend": backend},
    }
    return ran(measurement={"losses": losses}, **cell)


BACKENDS = {
    "legacy_ddp": "legacy DDP",
    "ddp": "DDP",
    "fsdp_flat": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}


def test_many_backends_take_turns_on_the_reference() -> None:
    rows = [learned("lasp", backend, 1e-7 * n) for n, backend in enumerate(BACKENDS)]
    rows += [learned("single", "legacy_ddp", 0), learned("single", "legacy_ddp", 1e-8, "fp64")]
    figure = draw.figure(rows, pd.DataFrame())
    assert_nothing_overlaps(figure)
    lines = [artists(figure, f"language LASP on 4 ranks, fp32, {name}")[0] for name in BACKENDS.values()]
    assert len({line.get_color() for line in lines}) == len(BACKENDS)
    assert all(line.get_linestyle() == "--" for line in lines)
    below = points(figure, "deviation language LASP on 4 ranks, fp32, ZeRO-3")
    assert below[1] == (2, pytest.approx(5e-7, rel=0.1))
    assert len(legend(figure)) == len(BACKENDS) + 2
    assert figure.axes[0].get_title() == "tnl-mini: Next-token loss"
