"""The figure of the longest sequences, switch by switch: what is drawn is what the rows say."""

from functools import partial
from typing import Any

import pandas as pd

from spbench.plots.today import draw_max_seqlen_today, switches
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
        "tiled loss + ring self attention",
        "... + tiled MLP + checkpoints on host",
    ]
    assert {text.get_text() for text in ax.texts} >= {"none", "1.1M", "3.8M"}


def test_switches_in_words() -> None:
    assert switches(ROWS[2]) == "tiled loss + ring self attention + tiled MLP + checkpoints on host"
