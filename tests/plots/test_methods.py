"""Methods beside each other, and figures of which there is nothing to draw."""

from pathlib import Path

import pytest
from pandas import DataFrame

from spbench.plots import NothingToDraw
from spbench.plots.grid import Drawing
from spbench.plots.largest import draw_max_seqlen
from spbench.plots.methods import draw
from spbench.plots.series import Row
from tests.plots.drawn import artists, drawn, points
from tests.plots.rows import ran, searched


def measured(strategy: str, seq_len: int, status: str = "ok", **cell: object) -> Row:
    """A row whose throughput and peak grow with its length."""
    measurement = {"tokens_per_s": 10.0 * seq_len, "peak_memory_bytes": 2**20 * seq_len}
    given = {"model": "llama3-8b", "batch": 8, "cluster": "dgx-h100", **cell}
    return ran(status, measurement, strategy=strategy, seq_len=seq_len, **given)


ROWS = [
    *(measured("ulysses", length, sizes={"dp": 2, "sp": 4}) for length in (1024, 2048)),
    measured("ulysses", 4096, "oom", sizes={"dp": 2, "sp": 4}),
    *(measured("ring_attention", length, sizes={"sp": sp}) for length in (1024, 2048) for sp in (4, 8)),
]


def test_a_line_for_each_strategy_in_a_panel_for_each_number_of_gpus() -> None:
    """Searches are left out."""
    figure = drawn(draw, [*ROWS, searched("tensor_parallel", 8, 512)])
    assert points(figure, "ours throughput_tokens_per_s Ulysses") == [(1024, 10240), (2048, 20480)]
    assert points(figure, "ours peak_memory_gib Ulysses") == [(1024, 1), (2048, 2)]
    assert len(artists(figure, "ours oom Ulysses")) == 2
    assert len(artists(figure, "ours throughput_tokens_per_s ring attention")) == 2
    titles = {ax.get_title() for ax in figure.axes if ax.get_title()}
    assert titles == {f"llama3-8b, {n} \N{MULTIPLICATION SIGN} dgx-h100" for n in (4, 8)}


def test_layouts_of_one_strategy_are_lines_of_their_own() -> None:
    figure = drawn(draw, [*ROWS[:2], *(measured("ulysses", n, sizes={"sp": 8}) for n in (1024, 2048))])
    for sizes in ("dp2xsp4", "sp8"):
        assert len(points(figure, f"ours peak_memory_gib Ulysses, {sizes}")) == 2


@pytest.mark.parametrize(
    ("figure", "rows", "of"),
    [
        (draw_max_seqlen, ROWS, "searches for the largest seq_len"),
        (draw, [searched("tensor_parallel", 8, 512)], "measurements at a given sequence length"),
    ],
)
def test_a_figure_of_nothing_is_an_error_without_files(
    tmp_path: Path, figure: Drawing, rows: list[Row], of: str
) -> None:
    with pytest.raises(NothingToDraw, match=f"no cell here is of what it shows: {of}"):
        figure(rows, DataFrame(), tmp_path)
    assert list(tmp_path.iterdir()) == []
