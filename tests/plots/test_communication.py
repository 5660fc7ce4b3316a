"""The figure of bytes sent: bars are the metered bytes, lines over them the closed form."""

import copy
from functools import partial
from typing import Any

import pytest
from matplotlib.figure import Figure

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.plots.communication import deviations, draw, sent_bytes
from tests.plots.drawn import artists, assert_below_zero, legend, points
from tests.plots.drawn import drawn as drawn_by
from tests.plots.rows import compared, row_of, table

Row = dict[str, Any]
TP, RSA = "tensor parallel", "ring self attention"


@pytest.fixture(scope="module")
def traced() -> list[Row]:
    """Real rows: two strategies on a few virtual ranks."""
    rows = []
    for strategy, axis in (("tensor_parallel", "tp"), ("ring_self_attention", "sp")):
        for ranks in (2, 4):
            settings = {"model": "bert-tiny", "batch": 2, "seq_len": 48, "sizes": {axis: ranks}}
            cell = Cell.model_validate({**settings, "strategy": strategy})
            measured = VirtualEngine().measure(cell)
            rows.append(row_of(cell, measured.as_dict(), measured.status))
    return rows


def on(engine: str, rows: list[Row]) -> list[Row]:
    """The same rows as if that engine had made them."""
    copies = copy.deepcopy(rows)
    for row in copies:
        row["cell"]["engine"] = engine
        row["key"] = row["key"].replace("virtual", engine)
    return copies


@pytest.fixture
def rows(traced: list[Row]) -> list[Row]:
    """The same rows of two engines, virtual ones last."""
    return [*on("distributed", traced), *on("virtual", traced)]


drawn = partial(drawn_by, draw)


def notes(figure: Figure) -> list[str]:
    (text,) = artists(figure, "notes")
    return str(text.get_text()).splitlines()


def of(rows: list[Row], strategy: str, ranks: int, engine: str = "virtual") -> Row:
    """The row of a strategy, by its name in figures, on so many ranks."""
    (row,) = (
        row
        for row in rows
        if row["cell"]["strategy"].replace("_", " ") == strategy
        and row["cell"]["engine"] == engine
        and ranks in row["cell"]["sizes"].values()
    )
    return row


def test_bars_stack_the_phases_up_to_the_closed_form(rows: list[Row]) -> None:
    figure = drawn(rows)
    (ax,) = figure.axes[:-1]
    assert (ax.get_title(), ax.get_ylabel()) == ("bert-tiny, batch 2, L 48", "Sent per GPU and step (KiB)")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4"]
    for name, phases in ((TP, ("forward", "backward")), (RSA, ("forward", "backward", "gradient_sync"))):
        for place, ranks in enumerate((2, 4)):
            bottom, row = 0.0, of(rows, name, ranks)
            for phase in phases:
                (bar,) = artists(figure, f"{phase} {name} {ranks} virtual")
                sent = sent_bytes(row, "communication", phase)
                assert sent
                assert bar.get_y() == pytest.approx(bottom)
                assert bar.get_height() == pytest.approx(sent / 1024)
                assert abs(bar.get_x() + bar.get_width() / 2 - place) < 0.5
                bottom += bar.get_height()
            planned = sum(entry["sent_bytes"] for entry in row["measurement"]["formula"]) / 1024
            (_, left), (_, right) = points(figure, f"formula {name} {ranks} virtual")
            assert left == right == planned == pytest.approx(bottom)
    assert legend(figure) == [TP, RSA, "forward", "backward", "gradient sync", "closed form"]


def test_engines_that_agree_share_a_bar_and_a_line_of_text_says_so(rows: list[Row]) -> None:
    figure = drawn(rows)
    assert not artists(figure, f"forward {TP} 2 distributed")
    assert notes(figure) == [
        f"engine {name}: 4 of 4 cells send exactly the bytes of their closed form"
        for name in ("distributed", "virtual")
    ]


def test_an_engine_that_sends_other_bytes_has_a_bar_with_its_deviation(rows: list[Row]) -> None:
    wrong = of(rows, TP, 2, "distributed")
    entry = next(e for e in wrong["measurement"]["communication"] if e["phase"] == "forward")
    entry["sent_bytes"] *= 1.5
    figure = drawn(rows)
    (honest,), (longer,) = (artists(figure, f"forward {TP} 2 {e}") for e in ("virtual", "distributed"))
    assert longer.get_height() > 1.01 * honest.get_height()
    assert abs(longer.get_x() - honest.get_x()) >= 0.99 * honest.get_width()
    total, planned = (sent_bytes(wrong, source) for source in ("communication", "formula"))
    assert total is not None
    assert planned is not None
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.texts] == [f"{total / planned - 1:+.2%}"]
    assert "engine distributed: 3 of 4 cells send exactly the bytes of their closed form" in notes(figure)
    assert any(line.startswith(f"bert-tiny, {TP} at 2 GPUs, distributed: +") for line in notes(figure))


def test_bytes_that_moved_from_one_phase_to_another_are_a_deviation(rows: list[Row]) -> None:
    row = of(rows, RSA, 2)
    assert deviations(row) == {}
    forward, backward = (
        next(e for e in row["measurement"]["communication"] if e["phase"] == phase)
        for phase in ("forward", "backward")
    )
    forward["sent_bytes"] -= 96
    backward["sent_bytes"] += 96
    assert list(deviations(row)) == ["forward", "backward"]
    assert "engine virtual: 3 of 4 cells send exactly the bytes of their closed form" in notes(drawn(rows))


def test_a_closed_form_that_is_not_known_is_no_deviation(rows: list[Row]) -> None:
    for row in rows:
        row["measurement"]["formula"] = []
    figure = drawn(rows)
    assert "engine virtual: 0 of 0 cells send exactly the bytes of their closed form" in notes(figure)
    assert not artists(figure, f"formula {TP} 2 virtual")
    assert "closed form" not in legend(figure)


def test_claims_that_are_exactly_met_are_one_line_and_others_are_drawn(rows: list[Row]) -> None:
    exact = [compared(f"formula {n}", 1e9 + n, 1e9 + n, rows[0]["key"]) for n in range(40)]
    assert notes(drawn(rows, table(*exact)))[-1] == "40 of 40 numbers of formulas exactly met"
    off = compared("formula that is off", 1e9, 1e9 + 8, rows[0]["key"])
    unknown = compared("formula not run", 5.0, None, "nowhere")
    figure = drawn(rows, table(*exact, off, unknown))
    assert notes(figure)[-2:] == [
        "40 of 42 numbers of formulas exactly met",
        "1 of 42 numbers of formulas not measured",
    ]
    claims = figure.axes[-2]
    assert [label.get_text() for label in claims.get_yticklabels()] == ["formula that is off"]
    assert "+8e-07%" in [text.get_text() for text in claims.texts]


def test_settings_have_panels_of_their_own(rows: list[Row]) -> None:
    deeper = copy.deepcopy(rows)
    for row, layers in [*((row, 1) for row in rows), *((row, 2) for row in deeper)]:
        row["cell"]["model_options"] = {"layers": layers}
    off = compared("a formula with a long name, 2 GPUs, virtual", 1e9, 1e9 + 8, rows[0]["key"])
    figure = drawn([*deeper, *rows], table(off))
    titles = [f"bert-tiny, layers {layers}, batch 2, L 48" for layers in (1, 2)]
    assert [ax.get_title() for ax in figure.axes[:2]] == titles
    assert [bar.axes for bar in artists(figure, f"forward {TP} 4 virtual")] == figure.axes[:2]


def test_rows_without_bytes_are_marked_and_told(rows: list[Row]) -> None:
    lost = {"oom": (TP, 2), "unsupported": (TP, 4), "failed": (RSA, 2)}
    for status, (name, ranks) in lost.items():
        of(rows, name, ranks).update(status=status, reason="a reason", measurement={})
    figure = drawn(rows)
    for place, (status, (name, ranks)) in zip((0, 1, 0), lost.items(), strict=True):
        (mark,) = artists(figure, f"{status} {name} {ranks} virtual")
        assert abs(mark.get_xdata()[0] - place) < 0.5
        assert_below_zero(mark)
        assert artists(figure, f"forward {name} {ranks} distributed")
    assert notes(figure)[-2:] == [
        f"bert-tiny, {TP} at 4 GPUs, virtual: unsupported (a reason)",
        f"bert-tiny, {RSA} at 2 GPUs, virtual: failed (a reason)",
    ]
    assert {"out of memory", "unsupported", "failed"} < set(legend(figure))
