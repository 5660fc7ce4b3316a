"""Figures over the sequence length: lines are ours, hollow markers what was published."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from spbench.plots.axes import length_text
from spbench.plots.lasp import draw_lasp_scalability, draw_lasp_speed
from tests.plots.drawn import artists, drawn, legend, points
from tests.plots.rows import published, ran, table

Row = dict[str, Any]
MEMORY, THROUGHPUT = "memory_gb", "throughput_tokens_per_s"
LENGTHS = [2048, 4096, 8192]


def at(length: int, count: int, backend: str = "ddp", status: str = "ok") -> Row:
    """A GiB for each 1024 tokens of a GPU's part, and 1000 tokens/s a GPU."""
    return ran(
        status,
        {"peak_memory_bytes": length // count * 2**20, "tokens_per_s": 1000.0 * count},
        model="tnl-1b",
        strategy="lasp",
        sizes={"sp": count},
        batch=1,
        seq_len=length,
        training={"backend": backend},
    )


def method(strategy: str, length: int, tokens_per_s: float, reading: str = "", status: str = "ok") -> Row:
    options = {"linear_attention": reading} if reading else {}
    return ran(
        status,
        {"tokens_per_s": tokens_per_s},
        model="tnl-1b",
        strategy=strategy,
        sizes={"tp" if strategy == "megatron_sp" else "sp": 64},
        batch=1,
        seq_len=length,
        model_options=options,
    )


SCALED = [at(n, count, backend) for backend in ("ddp", "fsdp_flat") for count in (8, 16) for n in LENGTHS]
LOST = [at(16384, 8, status="oom"), at(16384, 16, status="unsupported")]
PUBLISHED = table(
    *(published(row, MEMORY, 22.5) for row in SCALED[:3]),
    *(published(row, quantity, None, "unstated") for row in SCALED[3:5] for quantity in (MEMORY, THROUGHPUT)),
    *(published(LOST[0], quantity, None, "oom") for quantity in (MEMORY, THROUGHPUT)),
)
SPEED = [
    *(method("ulysses", n, n / 8, reading) for reading in ("left_product", "chunked") for n in LENGTHS),
    *(method("lasp", n, n / 2) for n in LENGTHS),
    method("ulysses", 16384, 0, "left_product", "oom"),
    method("ulysses", 16384, 0, "chunked", "oom"),
]
SPEED_PUBLISHED = table(
    *(published(row, THROUGHPUT, 300.0) for row in SPEED if row["cell"]["seq_len"] == 4096),
    *(published(row, THROUGHPUT, None, "oom") for row in SPEED[-2:]),
)


def scaling(rows: list[Row], comparison: pd.DataFrame | None = None) -> Figure:
    return drawn(draw_lasp_scalability, rows, comparison)


def speed(rows: list[Row], comparison: pd.DataFrame) -> Figure:
    return drawn(draw_lasp_speed, rows, comparison)


def test_a_column_for_each_backend_and_a_row_for_each_quantity() -> None:
    figure = scaling(SCALED)
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == ["tnl-1b, DDP", "tnl-1b, FSDP", "", ""]
    assert [ax.get_ylabel() for ax in axes] == ["Peak memory (GiB)", "", "Tokens per second", ""]
    assert [ax.get_xlabel() for ax in axes] == ["", "", *["Sequence length (tokens)"] * 2]
    ddp, fsdp = artists(figure, f"ours {MEMORY} 8 GPUs")
    assert (ddp.axes, fsdp.axes) == (axes[0], axes[1])
    assert [(x, y) for x, y in ddp.get_xydata()] == [(2048, 0.25), (4096, 0.5), (8192, 1)]
    _, throughput = artists(figure, f"ours {THROUGHPUT} 16 GPUs")
    assert list(throughput.get_ydata()) == [16000] * 3
    assert [label.get_text() for label in axes[-1].get_xticklabels()] == ["2K", "4K", "8K"]
    assert legend(figure) == ["8 GPUs", "16 GPUs"]


def test_published_numbers_are_hollow_and_not_joined() -> None:
    figure = scaling([*SCALED, *LOST], PUBLISHED)
    (markers,) = artists(figure, f"published {MEMORY} 8 GPUs")
    assert markers.axes is figure.axes[0]
    assert [(x, y) for x, y in markers.get_xydata()] == [(length, 22.5) for length in LENGTHS]
    assert markers.get_markerfacecolor() == "none"
    assert markers.get_linestyle() == "None"
    assert figure.axes[0].get_ylim()[1] > 22.5
    # unstated is no number
    assert not artists(figure, f"published {MEMORY} 16 GPUs")


def test_lengths_without_a_number_are_marked_below_the_values() -> None:
    figure = scaling([*SCALED, *LOST], PUBLISHED)
    memory, throughput = figure.axes[0], figure.axes[2]
    for gid in ("ours oom 8 GPUs", "published oom 8 GPUs", "ours unsupported 16 GPUs"):
        marks = artists(figure, gid)
        assert [mark.axes for mark in marks] == [memory, throughput]
        assert all(list(mark.get_xdata()) == [16384] for mark in marks)
    for ax in (memory, throughput):
        ours = [line for line in ax.lines if str(line.get_gid()).startswith("ours ")]
        marks = [line for line in ours if len(line.get_xdata()) == 1]
        lines = [line for line in ours if len(line.get_xdata()) > 1]
        highest = max(ax.transAxes.transform((0, float(mark.get_ydata()[0])))[1] for mark in marks)
        assert highest < min(ax.transData.transform(line.get_xydata())[:, 1].min() for line in lines)
    assert legend(figure) == [
        *("8 GPUs", "16 GPUs", "published"),
        *("out of memory from here on", "out of memory from here on, published", "unsupported"),
    ]
    (notes,) = artists(figure, "notes")
    assert notes.get_text() == "tnl-1b, DDP, 16 GPUs: unsupported at 16K (reason of unsupported)"


def test_out_of_memory_is_marked_at_the_shortest_length() -> None:
    figure = scaling([*SCALED[:3], *(at(n, 8, status="oom") for n in (65536, 32768, 16384))])
    marks = artists(figure, "ours oom 8 GPUs")
    assert [list(mark.get_xdata()) for mark in marks] == [[16384], [16384]]


def test_a_panel_without_some_line_leaves_the_legend_in_order() -> None:
    others = [{**row, "cell": {**row["cell"], "model": "tnl-7b"}} for row in SPEED[:3]]
    names = ["Ulysses, left product", "Ulysses, right product", "LASP"]
    assert legend(speed([*SPEED, *others], SPEED_PUBLISHED))[:3] == names


def test_two_readings_of_one_method_are_two_lines_beside_one_published_marker() -> None:
    figure = speed(SPEED, SPEED_PUBLISHED)
    left, right = "Ulysses, left product", "Ulysses, right product"
    for name in (left, right):
        assert points(figure, f"ours {THROUGHPUT} {name}") == [(n, n / 8) for n in LENGTHS]
        assert len(artists(figure, f"ours oom {name}")) == 1
    (solid,) = artists(figure, f"ours {THROUGHPUT} LASP")
    dashes = {artists(figure, f"ours {THROUGHPUT} {name}")[0].get_linestyle() for name in (left, right)}
    assert len(dashes | {solid.get_linestyle()}) == 3
    assert points(figure, f"published {THROUGHPUT} {left}") == [(4096, 300)]
    assert not artists(figure, f"published {THROUGHPUT} {right}")
    assert len(artists(figure, f"published oom {left}")) == 1
    assert not artists(figure, f"published oom {right}")
    assert legend(figure)[:4] == [left, right, "LASP", "published"]


def test_lengths_are_written_as_in_papers() -> None:
    assert [length_text(n) for n in (2048, 4194304, 1000)] == ["2K", "4096K", "1000"]


def test_a_single_column_is_laid_out_in_one_row() -> None:
    figure = scaling([row for row in SCALED if row["cell"]["training"]["backend"] == "ddp"])
    first, second = figure.axes
    assert first.get_position().y0 == pytest.approx(second.get_position().y0)
    assert (first.get_ylabel(), second.get_ylabel()) == ("Peak memory (GiB)", "Tokens per second")
