"""Figures of splits over several axes: their names, memory against the card, bytes by axis, ratios."""

from typing import Any

import pytest

from spbench.plots.bars import Bar, Segment, draw_levels
from spbench.plots.grid import Panel, PanelGrid
from spbench.plots.splits import SEVERAL, draw_four_d, draw_max_seqlen_4d, sent_by_axis, split_names
from tests.plots.drawn import artists, drawn, legend
from tests.plots.rows import compared, ran, table

Row = dict[str, Any]
GIB = 2**30
RSA, TP_RSA, MSP_RSA = (
    "ring_self_attention",
    "tensor_parallel+ring_self_attention",
    "megatron_sp+ring_self_attention",
)
COMPOSED = "tp 4 \N{MULTIPLICATION SIGN} sp 16, Megatron-SP + RSA"


def sent(**gib: float) -> list[Row]:
    return [{"axis": axis, "sent_bytes": size * GIB} for axis, size in gib.items()]


def timed(strategy: str, sizes: dict[str, int], seconds: float, peak: float, **other: Any) -> Row:
    measurement = {
        "peak_memory_bytes": peak * GIB,
        "usable_memory_bytes": 15 * GIB,
        "step_time_s": seconds,
        "communication": other.pop("communication", sent(sp=3.0)),
    }
    cell = {"model": "bert-large", "batch": 64, "seq_len": 2048, "cluster": "piz-daint-p100"}
    return ran(measurement=measurement, strategy=strategy, sizes=sizes, **cell | other)


def lost(strategy: str, sizes: dict[str, int], peak: float) -> Row:
    """A row out of memory, which has a peak all the same, and bytes."""
    row = timed(strategy, sizes, 0.0, peak)
    measurement = row["measurement"] | {"step_time_s": None}
    return row | {"status": "oom", "reason": "no room", "measurement": measurement}


ROWS = [
    timed(RSA, {"sp": 64}, 17.5, 13.5),
    lost(TP_RSA, {"tp": 16, "sp": 4}, 20.0),
    timed(MSP_RSA, {"tp": 4, "sp": 16}, 5.9, 10.9, communication=sent(tp=2.5, sp=10.0, tp_sp=0.5)),
    timed(MSP_RSA, {"tp": 4, "sp": 16}, 4.0, 9.0, communication=sent(sp=1.0), batch=16, cluster="dgx-a100"),
]


# -- names and bytes of splits ---------------------------------------------------------------------------


def test_a_split_is_named_by_its_mesh_from_outside_in() -> None:
    ordered = timed(MSP_RSA, {"tp": 4, "sp": 16}, 1, 1, mesh=["sp", "tp"])
    assert split_names([ROWS[2], ordered]) == [
        COMPOSED,
        "sp 16 \N{MULTIPLICATION SIGN} tp 4, Megatron-SP + RSA",
    ]


def test_settings_tell_rows_apart_that_are_split_alike() -> None:
    common: Any = (RSA, {"dp": 2, "sp": 4}, 1, 1)
    rows = [
        timed(*common, training={"backend": "zero1"}),
        timed(*common, training={"backend": "zero3"}, model_options={"checkpointing": True}),
        timed(RSA, {"sp": 8}, 1, 1),
    ]
    split = "dp 2 \N{MULTIPLICATION SIGN} sp 4, RSA"
    assert split_names(rows) == [
        f"{split}, ZeRO-1",
        f"{split}, ZeRO-3, recomputed",
        "sp 8, RSA",
    ]


def test_bytes_over_several_axes_are_one_kind() -> None:
    row = timed(RSA, {"sp": 4}, 1, 1, communication=sent(tp_sp=1.0, sp=2.0, dp_sp=3.0, tp=0.0, dp=5.0))
    assert sent_by_axis(row) == {"dp": 5 * GIB, "sp": 2 * GIB, SEVERAL: 4 * GIB}


# -- bars ------------------------------------------------------------------------------------------------


def test_a_bar_much_longer_than_others_is_cut_and_says_so() -> None:
    bars = [Bar([Segment(n, "#355ba9", f"bar {n}")], f"bar {n}") for n in (1, 2, 3, 100)]
    figure = PanelGrid("bars").add([[Panel(lambda ax: draw_levels(ax, bars, "abcd"))]]).draw()
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.texts] == ["1", "2", "3", "\N{MUCH GREATER-THAN} 100"]
    (longest,) = artists(figure, "bar 100")
    assert longest.get_width() == pytest.approx(7.5)  # three times the median


# -- four_d ----------------------------------------------------------------------------------------------


def test_panels_are_works_and_levels_the_splits_by_time() -> None:
    figure = drawn(draw_four_d, ROWS)
    memory, bytes_, time, other, *_ = figure.axes
    assert "batch 64, sequence length 2K, 64 GPUs of piz-daint-p100" in memory.get_title("left")
    assert "batch 16" in other.get_title("left")
    assert [label.get_text() for label in memory.get_yticklabels()] == [
        COMPOSED,
        "sp 64, RSA",
        "tp 16 \N{MULTIPLICATION SIGN} sp 4, TP + RSA",
    ]
    assert [bar.get_width() for bar in artists(figure, f"time {COMPOSED}")] == [5.9, 4.0]
    assert (bytes_.get_xlabel(), time.get_xlabel()) == (
        "Sent by a GPU\nin a step (GiB)",
        "Simulated step\ntime (s)",
    )


def test_bytes_are_stacked_by_axis() -> None:
    figure = drawn(draw_four_d, ROWS)
    found = [artists(figure, f"sent {axis} {COMPOSED}")[0] for axis in ("tp", "sp", SEVERAL)]
    assert [(bar.get_x(), bar.get_width()) for bar in found] == [(0, 2.5), (2.5, 10.0), (12.5, 0.5)] or [
        (bar.get_x(), round(bar.get_x() + bar.get_width(), 9)) for bar in found
    ] == [(0, 2.5), (2.5, 9.0), (9.0, 9.0)]
    assert legend(figure)[:3] == ["tp", "sp", SEVERAL]


def test_a_split_that_does_not_fit_reaches_past_the_cards_memory_and_has_no_time() -> None:
    figure = drawn(draw_four_d, ROWS)
    limit, _ = artists(figure, "limit")
    assert list(limit.get_xdata()) == [15, 15]
    (needed,) = artists(figure, "memory tp 16 \N{MULTIPLICATION SIGN} sp 4, TP + RSA")
    assert needed.get_width() == 20
    assert needed.get_hatch()
    (mark,) = artists(figure, "time tp 16 \N{MULTIPLICATION SIGN} sp 4, TP + RSA")
    assert mark.get_marker() == "x"
    assert "out of memory" in legend(figure)


# -- max_seqlen_4d ---------------------------------------------------------------------------------------


def longest(strategy: str, sizes: dict[str, int], answer: int | None, quantity: str = "seq_len") -> Row:
    given = {"seq_len": {"batch": 16}, "batch": {"seq_len": 512}}[quantity]
    asked = {"model": "bert-large", "search": {"quantity": quantity, "step": 4}, **given}
    status = "ok" if answer else "oom"
    return ran(status, {"answer": answer}, strategy=strategy, sizes=sizes, **asked)


SEARCHES = [
    longest(RSA, {"sp": 64}, 3072),
    longest(MSP_RSA, {"tp": 4, "sp": 16}, 3328),
    longest(TP_RSA, {"tp": 16, "sp": 4}, None),
    longest(RSA, {"sp": 64}, 600, "batch"),
    longest(MSP_RSA, {"tp": 4, "sp": 16}, 864, "batch"),
]
RATIOS = table(
    {**compared("longest", 1.0, 3328 / 3072, SEARCHES[1]["key"], SEARCHES[0]["key"]), "published": None}
)


def test_the_longest_split_stands_first_with_its_ratio() -> None:
    figure = drawn(draw_max_seqlen_4d, SEARCHES, RATIOS)
    length, batch = figure.axes[:2]
    labels = [label.get_text() for label in length.get_yticklabels()]
    assert labels == [
        COMPOSED,
        "sp 64, RSA",
        "tp 16 \N{MULTIPLICATION SIGN} sp 4, TP + RSA",
    ]
    assert [text.get_text() for text in length.texts] == ["3,328  (1.08\N{MULTIPLICATION SIGN})", "3,072"]
    # a split without a search for the batch has neither a bar nor a mark
    assert [text.get_text().strip() for text in batch.texts] == ["864", "600", ""]
    assert length.get_title() == "bert-large, batch 16"
    assert batch.get_title() == "bert-large, sequence length 512"
    (mark,) = artists(figure, "seq_len tp 16 \N{MULTIPLICATION SIGN} sp 4, TP + RSA")
    assert mark.get_marker() == "x"


def test_micro_batches_stand_in_a_name() -> None:
    rows = [timed(RSA, {"sp": 8}, 1, 1, training={"micro_batches": n}) for n in (1, 4)]
    assert split_names(rows) == ["sp 8, RSA", "sp 8, RSA, 4 micro-batches"]


def test_a_refused_split_has_a_note() -> None:
    refused = ran("unsupported", model="bert-large", strategy=RSA, sizes={"sp": 5}, batch=64, seq_len=2048)
    figure = drawn(draw_four_d, [*ROWS, refused])
    assert "unsupported" in legend(figure)
    (note,) = artists(figure, "notes")
    assert "reason of unsupported" in note.get_text()
