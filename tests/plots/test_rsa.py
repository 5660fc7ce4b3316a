"""Figures of the RSA paper over the number of GPUs: Table 4 with what was published, and pipeline stages."""

from typing import Any

import pandas as pd
import pytest

from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.tools.papers.answer import compare, load_scenario
from spbench.bench.tools.papers.comparison import as_frame
from spbench.plots.rsa import draw_rsa_pipeline, draw_rsa_table4
from tests.plots.drawn import artists, assert_below_zero, drawn, legend, points
from tests.plots.rows import row_of, searched

Row = dict[str, Any]
SCENARIO = load_scenario("rsa_table4")
CELLS = declared_cells(SCENARIO, Narrowing())
BATCH, LENGTH = "batch 64 to 512, sequence length 512", "batch 64, sequence length 256 to 2048"


@pytest.fixture
def rows() -> list[Row]:
    """7000 MiB and 9000 tokens/s in each cell, but for the one that the paper has as out of memory."""
    made = []
    for cell in CELLS:
        lost = cell.batch == 512 and cell.sizes.tp == 8
        measured = {"peak_memory_bytes": 7000 * 2**20, "tokens_per_s": None if lost else 9000.0}
        made.append(row_of(cell, measured, "oom" if lost else "ok"))
    return made


def comparison(rows: list[Row]) -> pd.DataFrame:
    return as_frame(compare(SCENARIO, CELLS, {row["key"]: row for row in rows}))


def test_published_stands_around_ours(rows: list[Row]) -> None:
    figure = drawn(draw_rsa_table4, rows, comparison(rows))
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


# -- pipeline stages -------------------------------------------------------------------------------------

TP, RSA = "tensor_parallel", "ring_self_attention"


def timed(strategy: str, ranks: int, pp: int, model: str = "bert-base", status: str = "ok") -> Row:
    """A timed search of ``ranks`` a stage: 10 sequences and 1000 tokens/s a GPU."""
    world = ranks * pp
    row = searched(strategy, ranks, 10 * world, status, quantity="batch", model=model)
    row["cell"]["sizes"]["pp"] = pp
    row["measurement"]["tokens_per_s"] = 1000.0 * world
    if status == "unsupported":
        row["measurement"] = {}
    return row


BY_STAGES = [
    *(timed(strategy, 4, pp) for strategy in (TP, RSA) for pp in (4, 1, 2)),
    *(timed(strategy, 4, 8, status="unsupported") for strategy in (TP, RSA)),
    *(timed(RSA, 4, pp, "bert-large") for pp in (1, 2)),
]


def test_a_column_for_each_model_and_a_row_for_each_quantity() -> None:
    figure = drawn(draw_rsa_pipeline, BY_STAGES)
    assert [ax.get_title() for ax in figure.axes[:4]] == [
        *["bert-base, sequence length 64", "bert-large, sequence length 64", "", ""]
    ]
    assert [ax.get_ylabel() for ax in figure.axes[:4]] == [
        *["Largest batch (sequences)", "", "Tokens per second", ""]
    ]
    assert [ax.get_xlabel() for ax in figure.axes[:4]] == ["", "", *["Number of GPUs, 4 a stage"] * 2]
    assert points(figure, "ours batch tensor parallel") == [(4, 40), (8, 80), (16, 160)]
    assert points(figure, "ours throughput tensor parallel") == [(4, 4000), (8, 8000), (16, 16000)]
    base, large = artists(figure, "ours throughput ring self attention")
    assert list(base.get_ydata()) == [4000, 8000, 16000]
    assert list(large.get_ydata()) == [4000, 8000]
    assert legend(figure) == ["tensor parallel", "ring self attention", "unsupported"]


def test_sizes_that_cannot_be_are_marked_and_told() -> None:
    figure = drawn(draw_rsa_pipeline, BY_STAGES)
    for name in ("tensor parallel", "ring self attention"):
        marks = artists(figure, f"ours unsupported {name}")
        assert [mark.axes for mark in marks] == [figure.axes[0], figure.axes[2]]
        for mark in marks:
            ((x, _),) = mark.get_xydata()
            assert x == 32
            assert_below_zero(mark)
    (notes,) = artists(figure, "notes")
    assert (
        "bert-base, sequence length 64, tensor parallel: unsupported at 32 GPUs (reason of unsupported)"
        in notes.get_text()
    )
