"""The figure of bytes sent: markers are the metered bytes, lines the closed form."""

import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from spbench.bench.cell import Cell
from spbench.bench.engines.virtual import VirtualEngine
from spbench.plots.communication import communication_figure, draw, sent_bytes
from spbench.plots.style import house_style
from tests.plots.drawn import artists, assert_nothing_overlaps, assert_valid, legend, points

Row = dict[str, Any]


@pytest.fixture(scope="module")
def traced() -> list[Row]:
    """Real rows: two strategies on a few virtual ranks."""
    rows = []
    for strategy, axis in (("tensor_parallel", "tp"), ("ring_self_attention", "sp")):
        for ranks in (2, 4):
            cell = Cell.model_validate(
                {
                    "model": "bert-tiny",
                    "strategy": strategy,
                    "sizes": {axis: ranks},
                    "batch": 2,
                    "seq_len": 48,
                }
            )
            measured = VirtualEngine().measure(cell)
            rows.append(
                {
                    "key": cell.key,
                    "cell": cell.model_dump(mode="json"),
                    "status": measured.status,
                    "reason": measured.reason,
                    "measurement": measured.as_dict(),
                }
            )
    return rows


@pytest.fixture
def rows(traced: list[Row]) -> list[Row]:
    """The same on the two engines."""
    real = copy.deepcopy(traced)
    for row in real:
        row["cell"]["engine"] = "distributed"
        row["key"] = row["key"].replace("virtual", "distributed")
    return [*copy.deepcopy(traced), *real]


def drawn(rows: list[Row]) -> Figure:
    with house_style():
        figure = communication_figure(rows, pd.DataFrame())
        assert_nothing_overlaps(figure)
    return figure


def of(rows: list[Row], strategy: str, engine: str = "virtual") -> list[Row]:
    return [r for r in rows if r["cell"]["strategy"] == strategy and r["cell"]["engine"] == engine]


def test_metered_and_closed_form_are_the_rows(rows: list[Row]) -> None:
    figure = drawn(rows)
    assert figure.axes[0].get_ylabel() == "Sent per GPU and step (KiB)"
    for strategy in ("tensor_parallel", "ring_self_attention"):
        name = strategy.replace("_", " ")
        for engine in ("virtual", "distributed"):
            sums = [
                sum(entry["sent_bytes"] for entry in row["measurement"]["communication"]) / 1024
                for row in of(rows, strategy, engine)
            ]
            assert points(figure, f"{engine} {name}") == list(zip((2, 4), sums, strict=True))
        sums = [
            sum(entry["sent_bytes"] for entry in row["measurement"]["formula"]) / 1024
            for row in of(rows, strategy)
        ]
        assert points(figure, f"formula {name}") == list(zip((2, 4), sums, strict=True))
    assert {"metered, virtual", "metered, distributed"} < set(legend(figure))


def test_engines_look_different(rows: list[Row]) -> None:
    figure = drawn(rows)
    (dots,), (rings,) = (artists(figure, f"{e} tensor parallel") for e in ("virtual", "distributed"))
    assert dots.get_markerfacecolor() != "none"
    assert rings.get_markerfacecolor() == "none"
    assert rings.get_markersize() > dots.get_markersize()


def test_bars_stack_the_phases(rows: list[Row]) -> None:
    figure = drawn(rows)
    for row in of(rows, "ring_self_attention"):
        bottom = 0.0
        for phase in ("forward", "backward", "gradient_sync"):
            (bar,) = artists(figure, f"{phase} ring self attention {row['cell']['sizes']['sp']}")
            sent = sent_bytes(row, "communication", phase)
            assert sent
            assert bar.get_y() == pytest.approx(bottom)
            assert bar.get_height() == pytest.approx(sent / 1024)
            bottom += bar.get_height()
        assert bottom == pytest.approx((sent_bytes(row, "communication") or 0) / 1024)


def test_other_bytes_than_the_formula_are_told(rows: list[Row]) -> None:
    assert not artists(drawn(rows), "notes")
    rows[0]["measurement"]["communication"][0]["sent_bytes"] *= 2
    (notes,) = artists(drawn(rows), "notes")
    assert "bert-tiny, tensor parallel at 2 GPUs: metered" in notes.get_text()


def test_rows_without_bytes_are_marked(rows: list[Row]) -> None:
    for row, status in zip(rows, ("oom", "unsupported", "failed"), strict=False):
        row |= {"status": status, "reason": "a reason", "measurement": {}}
    figure = drawn(rows)
    assert [x for x, _ in points(figure, "oom tensor parallel")] == [2]
    assert [x for x, _ in points(figure, "unsupported tensor parallel")] == [4]
    assert [x for x, _ in points(figure, "failed ring self attention")] == [2]
    assert points(figure, "virtual tensor parallel") == []
    assert [x for x, _ in points(figure, "distributed tensor parallel")] == [2, 4]
    only_failed = [{**row, "status": "failed", "measurement": {}} for row in rows]
    assert points(drawn(only_failed), "formula tensor parallel") == []


def test_files(rows: list[Row], tmp_path: Path) -> None:
    for name, some in (("all", rows), ("one", rows[:1]), ("none", [])):
        folder = tmp_path / name
        assert_valid(draw(some, pd.DataFrame(), folder), folder, "communication")
