"""Figures of values by number of GPUs: the RSA paper's throughput and pipeline figures."""

from typing import Any

from spbench.plots.rsa import draw_rsa_pipeline
from tests.plots.drawn import (
    artists,
    assert_below_zero,
    drawn,
    legend,
    points,
)
from tests.plots.rows import searched

TP, RSA = "tensor_parallel", "ring_self_attention"
Row = dict[str, Any]


def timed(strategy: str, ranks: int, pp: int, model: str = "bert-base", status: str = "ok") -> Row:
    """A timed search of ``ranks`` a stage: 10 sequences and 1000 tokens/s a GPU."""
    world = ranks * pp
    row = searched(strategy, ranks, 10 * world, status, quantity="batch", model=model)
    row["cell"]["sizes"]["pp"] = pp
    row["measurement"]["tokens_per_s"] = 1000.0 * world
    if status == "unsupported":
        row["measurement"] = {}
    return row


ROWS = [
    *(timed(strategy, 4, pp) for strategy in (TP, RSA) for pp in (4, 1, 2)),
    *(timed(strategy, 4, 8, status="unsupported") for strategy in (TP, RSA)),
    *(timed(RSA, 4, pp, "bert-large") for pp in (1, 2)),
]


def test_a_column_for_each_model_and_a_row_for_each_quantity() -> None:
    figure = drawn(draw_rsa_pipeline, ROWS)
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
    figure = drawn(draw_rsa_pipeline, ROWS)
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
