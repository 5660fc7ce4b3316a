"""Figures of the largest batch and sequence length: what is drawn is what the rows and claims say."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from spbench.plots.largest import draw_max_batch, draw_max_seqlen
from spbench.plots.paper import save
from spbench.plots.series import differing_settings
from spbench.plots.style import TIMES
from tests.plots.drawn import artists, assert_below_zero, assert_valid, legend, points
from tests.plots.drawn import drawn as drawn_by
from tests.plots.rows import compared, searched, table

TP, RSA = "tensor_parallel", "ring_self_attention"
ROWS = [
    *(searched(RSA, n, answer) for n, answer in ((64, 2816), (4, 768), (16, 1856))),
    *(searched(TP, n, answer) for n, answer in ((4, 652), (6, 788), (12, 1028))),
]
LINFORMER = searched(RSA, 32, 131072, model="bert-base-linformer", batch=4)
RATIO = compared("rsa-max-seqlen-base", 3.0, 2816 / 1028, ROWS[0]["key"], ROWS[5]["key"])
BOUND = compared("rsa-linformer-upper-bound", 114000.0, 131072.0, LINFORMER["key"])


drawn = partial(drawn_by, draw_max_seqlen)


def test_lines_are_the_rows() -> None:
    figure = drawn(ROWS)
    assert points(figure, "ours largest ring self attention") == [(4, 768), (16, 1856), (64, 2816)]
    assert points(figure, "ours largest tensor parallel") == [(4, 652), (6, 788), (12, 1028)]
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "6", "12", "16", "64"]
    assert ax.get_ylabel() == "Sequence length (tokens)"
    assert ax.get_title() == "bert-base, batch 64"
    assert legend(figure) == ["tensor parallel", "ring self attention"]


def test_batches() -> None:
    rows = [searched(TP, n, 8 * n, quantity="batch") for n in (4, 8)]
    figure = drawn_by(draw_max_batch, [*rows, *ROWS])
    assert points(figure, "ours largest tensor parallel") == [(4, 32), (8, 64)]
    assert not artists(figure, "ours largest ring self attention")
    assert figure.axes[0].get_ylabel() == "Batch (sequences)"


def test_cells_without_an_answer_are_marked_at_the_bottom() -> None:
    lost = [
        searched(TP, 2, None, "oom"),
        searched(RSA, 2, None, "oom"),
        searched(TP, 16, None, "unsupported"),
        searched(RSA, 128, None, "failed"),
        searched(RSA, 256, None, "timeout"),
    ]
    figure = drawn([*ROWS, *lost])
    assert points(figure, "ours largest tensor parallel") == [(4, 652), (6, 788), (12, 1028)]
    for status, line, count, marker in (
        ("oom", "tensor parallel", 2, "x"),
        ("oom", "ring self attention", 2, "x"),
        ("unsupported", "tensor parallel", 16, "s"),
        ("failed", "ring self attention", 128, "v"),
        ("timeout", "ring self attention", 256, "v"),
    ):
        (mark,) = artists(figure, f"ours {status} {line}")
        assert mark.get_marker() == marker
        assert mark.get_xdata() == [count]
        assert_below_zero(mark)
    assert {"out of memory", "unsupported", "failed"} < set(legend(figure))
    (notes,) = artists(figure, "notes")
    assert "tensor parallel: unsupported at 16 GPUs (reason of unsupported)" in " ".join(
        notes.get_text().split()
    )


def test_marks_of_two_strategies_stand_side_by_side() -> None:
    figure = drawn([searched(TP, 2, None, "oom"), searched(RSA, 2, None, "oom"), *ROWS])
    places = [
        mark.get_transform().transform(mark.get_xydata())[0]
        for line in ("tensor parallel", "ring self attention")
        for mark in artists(figure, f"ours oom {line}")
    ]
    assert abs(places[0][0] - places[1][0]) > 8
    assert places[0][1] == pytest.approx(places[1][1])


def test_claims_stand_beside_ours() -> None:
    missing = compared(
        "rsa-max-seqlen-large", 2.0, None, "elsewhere", "nowhere", note="numerator was not run"
    )
    figure = drawn([*ROWS, LINFORMER], table(RATIO, BOUND, missing))
    # in the panel of its model: the published ratio times our denominator
    implied = points(figure, "published largest ring self attention")
    assert implied == [(64, pytest.approx(3.0 * 1028))]
    assert f"published ratio {TIMES} our denominator" in legend(figure)
    _, linformer, claims = figure.axes
    heights = {bar.get_gid(): bar.get_height() for bar in linformer.patches if isinstance(bar, Rectangle)}
    assert heights == {"published": 114000, "ours largest ring self attention": 131072}
    for entry in (RATIO, BOUND):
        ((error, _),) = points(figure, f"claim {entry['claim']} first-steps")
        assert error == pytest.approx(entry["relative_error"])
    texts = [text.get_text() for text in claims.texts]
    for text in (
        f"3{TIMES}",
        f"2.74{TIMES}",
        "-8.7%",
        "114,000",
        "131,072",
        "+15.0%",
        f"2{TIMES}",
        "numerator was not run",
    ):
        assert text in texts


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_bound_without_an_answer(status: str) -> None:
    lost = {**LINFORMER, "status": status, "measurement": {"answer": None}}
    figure = drawn([lost], table({**BOUND, "reproduced": None, "relative_error": None}))
    assert [bar.get_gid() for bar in figure.axes[0].patches] == ["published"]
    (mark,) = artists(figure, f"ours {status} ring self attention")
    assert mark.get_xdata() == [1]
    assert_below_zero(mark)


def test_variants_are_lines_of_their_own() -> None:
    later = [searched(row["cell"]["strategy"], 4, 500, variant="all-steps") for row in ROWS[1:4:2]]
    figure = drawn([*ROWS, *later], table(RATIO, {**RATIO, "variant": "all-steps"}))
    assert points(figure, "ours largest tensor parallel, all-steps") == [(4, 500)]
    assert len(points(figure, "ours largest tensor parallel, first-steps")) == 3


@pytest.mark.parametrize("scenario", ["A scenario", {"title": "A scenario"}])
def test_the_scenarios_title_stands_above(scenario: object) -> None:
    figure = drawn([{**row, "scenario": scenario} for row in ROWS])
    text = figure.get_suptitle().replace("\n", " ")
    assert text == "A scenario (piz-daint-p100, fp16, first-steps, virtual engine)"


@pytest.mark.slow
def test_files_are_the_same_each_time_and_from_a_csv_file(tmp_path: Path) -> None:
    comparison = table(RATIO, BOUND)
    comparison.to_csv(tmp_path / "comparison.csv", index=False)
    first, second = (
        save(draw_max_seqlen.figure([*ROWS, LINFORMER], of), tmp_path / folder, "max_seqlen")
        for folder, of in (("first", comparison), ("second", pd.read_csv(tmp_path / "comparison.csv")))
    )
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert b"<dc:date>" not in first[1].read_bytes()


def test_drawing_needs_neither_torch_nor_the_harness() -> None:
    code = (
        "import sys\n"
        "from spbench.plots import communication, dsp, largest, lasp, rsa, splits\n"
        "print([name for name in ('torch', 'spbench.bench') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_nothing_fits_anywhere() -> None:
    figure = drawn([searched(TP, n, None, "oom") for n in (4, 8)], table(RATIO))
    assert points(figure, "ours largest tensor parallel") == []
    assert [mark.get_xdata() for mark in artists(figure, "ours oom tensor parallel")] == [[4], [8]]


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert_valid(draw_max_seqlen(ROWS, pd.DataFrame(), folder), folder, "max_seqlen")


def test_orders_of_the_mesh_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [searched("ring_self_attention", 8, 1000) for _ in range(2)]
    for row, mesh in zip(rows, (None, ["sp", "dp"]), strict=True):
        row["cell"] |= {"sizes": {"dp": 2, "sp": 8}, "mesh": mesh}
    text = differing_settings(rows)
    assert [text(row) for row in rows] == ["mesh default", "mesh sp dp"]
