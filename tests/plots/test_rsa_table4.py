"""The figure of RSA's Table 4: each of ours, and around it what was published."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from spbench.bench.config.scenario import compare, load_scenario
from spbench.bench.config.select import Narrowing, declared_cells
from spbench.bench.published.comparison import as_frame
from spbench.plots.rsa_table4 import draw, weak_scalings
from tests.plots.drawn import artists, assert_below_zero, assert_nothing_overlaps, legend

Row = dict[str, Any]
SCENARIO = load_scenario("rsa_table4")
CELLS = declared_cells(SCENARIO, Narrowing())
BATCH, LENGTH = "batch 64 to 512, sequence length 512", "batch 64, sequence length 256 to 2048"


@pytest.fixture
def rows() -> list[Row]:
    """7000 MiB and 9000 tokens/s in each cell, but for the one that the paper has as out of memory."""
    found = []
    for cell in CELLS:
        lost = cell.batch == 512 and cell.sizes.tp == 8
        measured = {"peak_memory_bytes": 7000 * 2**20, "tokens_per_s": None if lost else 9000.0}
        found.append(
            {
                "key": cell.key,
                "cell": cell.model_dump(mode="json"),
                "status": "oom" if lost else "ok",
                "reason": "",
                "measurement": measured,
            }
        )
    return found


def comparison(rows: list[Row]) -> pd.DataFrame:
    return as_frame(compare(SCENARIO, CELLS, {row["key"]: row for row in rows}))


def drawn(rows: list[Row], table: pd.DataFrame) -> Figure:
    figure = draw.figure(rows, table)
    assert_nothing_overlaps(figure)
    return figure


def test_two_scalings_of_eight_cells(rows: list[Row]) -> None:
    found = weak_scalings(rows[::-1])
    assert {name: len(some) for name, some in found.items()} == {BATCH: 8, LENGTH: 8}
    assert list(found) == [BATCH, LENGTH]


def test_published_stands_around_ours(rows: list[Row]) -> None:
    figure = drawn(rows, comparison(rows))
    assert [ax.get_title() for ax in figure.axes[:2]] == [BATCH, LENGTH]
    by_batch, by_length = artists(figure, "published memory_mb tensor parallel")
    # not at 64 GPUs, where tensor parallelism runs out of memory
    assert list(by_batch.get_xdata()) == [8, 16, 32]
    assert list(by_batch.get_ydata()) == [8477.28, 9520.47, 12232.52]
    assert list(by_length.get_xdata()) == [8, 16, 32, 64]
    assert (by_batch.axes, by_length.axes) == (figure.axes[0], figure.axes[1])
    _, throughput = artists(figure, "published throughput_tokens_per_s ring self attention")
    assert throughput.axes is figure.axes[3]
    assert throughput.get_ydata()[-1] == pytest.approx(21625.5, abs=0.1)
    ours, _ = artists(figure, "ours memory_mb tensor parallel")
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([8, 16, 32], [7000] * 3)
    for side in ("ours", "published"):
        marks = artists(figure, f"{side} oom tensor parallel")
        assert [mark.axes for mark in marks] == [figure.axes[0], figure.axes[2]]
        for mark in marks:
            assert list(mark.get_xdata()) == [64]
            assert_below_zero(mark)
    assert legend(figure) == [
        *("tensor parallel", "ring self attention", "published"),
        *("out of memory", "out of memory, published"),
    ]
    assert not artists(figure, "notes")


def test_both_scalings_have_one_scale(rows: list[Row]) -> None:
    limits = [ax.get_ylim() for ax in drawn(rows, comparison(rows)).axes]
    assert limits[0] == limits[1] != limits[2]
    assert limits[2] == limits[3]
    # the largest published memory, of a panel on the right
    assert limits[0][1] > 14839


def test_without_a_comparison_only_ours(rows: list[Row]) -> None:
    figure = drawn(rows, pd.DataFrame())
    assert "published" not in legend(figure)
    assert len(artists(figure, "ours memory_mb tensor parallel")) == 2
