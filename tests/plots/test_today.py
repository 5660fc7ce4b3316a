"""The figure of the longest sequences, switch by switch: what is drawn is what the rows say."""

from functools import partial
from typing import Any

import pandas as pd

from spbench.plots.today import _length, draw_max_seqlen_today, switches
from tests.plots.drawn import artists, drawn
from tests.plots.rows import searched

ladder = partial(drawn, draw_max_seqlen_today)


def rung(answer: int | None, strategy: str = "ring_self_attention", **options: Any) -> dict[str, Any]:
    row = searched(strategy, 8, answer, "ok" if answer else "oom", model_options=options)
    return {**row, "key": f"{row['key']} {options}"}


LOSS = {"loss_tile": "liger"}
ALL = {**LOSS, "mlp_tile": 4096, "checkpoints": "host"}
ROWS = [rung(None), rung(1_100_000, **LOSS), rung(3_800_000, **ALL)]


def test_a_bar_for_each_row_and_what_it_adds() -> None:
    published = {"cell": ROWS[2]["key"], "quantity": "tokens", "published": 4e6, "status_published": "ok"}
    figure = ladder(ROWS, pd.DataFrame([published]))
    (ax,) = figure.axes
    assert [bar.get_width() for bar in ax.patches if bar.get_height() > 0.5] == [1.1, 3.8]
    assert len(artists(figure, "ours oom ring self attention")) == 1
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "ring self attention",
        "... + tiled loss",
        "... + tiled MLP + checkpoints on host",
    ]
    assert {text.get_text() for text in ax.texts} >= {"none", "1.1M", "3.8M"}


def priced(row: dict[str, Any], length: int, ratio: float | None, batch: int = 1) -> tuple[Any, Any]:
    """The row of a step with a rung's settings, and the entry of its ratio to another step."""
    cell = {**row["cell"], "search": None, "seq_len": length, "batch": batch}
    step = {**row, "key": f"{row['key']} {length}", "cell": cell, "measurement": {"step_time_s": 1.0}}
    return step, {"numerator": step["key"], "quantity": "ratio", "reproduced": ratio, "published": None}


def test_what_a_switch_costs_stands_beside_it_of_the_longest_step() -> None:
    short = priced(ROWS[1], 2**17, 1.0137, batch=8)
    steps = [
        short,
        priced(ROWS[2], 2**17, 1.37),
        priced(ROWS[2], 2**20, 1.05602),
        priced(ROWS[2], 2**21, None),
    ]
    figure = ladder(ROWS + [row for row, _ in steps], pd.DataFrame([entry for _, entry in steps]))
    ax = figure.axes[0]  # the note has one too
    at = {text.get_text(): text.get_position()[1] for text in ax.texts if text.get_text().startswith("step")}
    assert at == {"step +1.4% (8 x 128K)": 1, "step +5.6% (1M)": 2}
    assert "how much longer it takes" in figure.axes[1].texts[0].get_text()


def test_rungs_are_in_the_order_of_their_switches_whichever_ended_first() -> None:
    (ax,) = ladder(ROWS[::-1]).axes
    assert [text.get_text() for text in ax.texts] == ["none", "1.1M", "3.8M"]


def test_switches_in_words() -> None:
    assert switches(ROWS[2]) == "tiled loss + ring self attention + tiled MLP + checkpoints on host"


def test_a_length_is_in_millions_from_one_million_on() -> None:
    assert [_length(tokens) for tokens in (None, 999_400, 1_000_000, 1_200_000)] == [
        "none",
        "999K",
        "1M",
        "1.2M",
    ]
