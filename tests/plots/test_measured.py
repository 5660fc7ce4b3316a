"""The figure of measured numbers and ours."""

from __future__ import annotations

import pytest
from pandas import DataFrame

from spbench.plots.measured import draw, draw_field
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES
from tests.plots.drawn import artists, assert_nothing_overlaps, legend


def record(
    table: str, quantity: str, measured: float, ours: float | None, role: str = "predicted"
) -> dict[str, object]:
    error = None if ours is None else ours / measured - 1
    numbers = {"published": measured, "reproduced": ours, "relative_error": error}
    return {"table": table, "quantity": quantity, **numbers, "role": role}


RECORDS = DataFrame(
    [
        record("b200: case, rank 0", "peak_memory_gib", 40.0, 40.1, "inferred"),
        record("b200: case, rank 1", "peak_memory_gib", 60.0, 59.7, "inferred"),
        record("goldens: case, dev", "peak_memory_gib", 1.5, 1.5),
        record("b200: case", "step_time_ms", 800.0, 840.0, "calibrated"),
        record("goldens: case, dev", "step_time_ms", 90.0, None),
        record("goldens: case, lts", "step_time_ms", 100.0, 60.0),
    ]
)


@pytest.mark.parametrize("width", [PAGE_INCHES, COLUMN_INCHES])
def test_each_number_has_its_place(width: float) -> None:
    figure = draw.figure([], RECORDS, width)
    assert_nothing_overlaps(figure)
    memory = [line.get_xydata().tolist() for line in artists(figure, "reproduced b200 inferred")]
    assert memory == [[[40.0, 40.1], [60.0, 59.7]]]
    (errors,) = artists(figure, "relative_error b200 calibrated")
    assert errors.get_xydata().tolist() == [[800.0, pytest.approx(0.05)]]
    assert errors.get_markerfacecolor() == "white"
    # a number without one of ours is said, not drawn
    times = [line.get_xydata().tolist() for line in artists(figure, "reproduced goldens predicted")]
    assert times == [[[1.5, 1.5]], [[100.0, 60.0]]]
    (note,) = artists(figure, "notes")
    assert "1 measured numbers have none of ours" in note.get_text()
    assert {"b200", "goldens", "predicted", "calibrated on it"} <= set(legend(figure))


def test_sources_have_one_colour_in_all_panels() -> None:
    figure = draw.figure([], RECORDS)
    colours = {
        source: {
            line.get_color()
            for ax in figure.axes
            for line in ax.lines
            if f" {source} " in str(line.get_gid())
        }
        for source in ("b200", "goldens")
    }
    assert all(len(found) == 1 for found in colours.values())
    assert colours["b200"] != colours["goldens"]


@pytest.mark.parametrize("width", [PAGE_INCHES, COLUMN_INCHES])
def test_published_times_have_a_panel_a_source(width: float) -> None:
    time = "step_time_ms"
    table = {"scenario": "usp", "status_published": "ok"}
    claim = {"scenario": "a_layer", "status_published": ""}
    records = DataFrame(
        [
            record("usp: case, tp 8", time, 5000.0, 4500.0) | table,
            record("usp: case, tp 4", time, 3000.0, None) | table,
            record("full", "step_time_s", 19.6, 19.8, "inferred") | claim,
            record("none", "step_time_s", 27.2, 27.5, "inferred") | claim,
        ]
    )
    figure = draw_field.figure([], records, width)
    assert_nothing_overlaps(figure)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == ["usp: 10.0%", "a layer: 1.1%"]
    (points,) = artists(figure, "reproduced a-layer inferred")
    assert points.get_xydata().tolist() == [[19.6, 19.8], [27.2, 27.5]]
    (shade,) = figure.axes[0].collections
    shares = {round(float(y / x), 9) for x, y in shade.get_paths()[0].vertices}
    assert shares == {0.9, 1.1}  # ten per cent either way
