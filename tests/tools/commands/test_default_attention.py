"""A run says which attention kernel stood for that which nobody named."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.tools.papers.execution import default_attention


def row(cluster: str, seconds: float = 1.0, model: str = "llama3-8b", **options: Any) -> dict[str, Any]:
    return {
        "cell": {"cluster": cluster, "model": model, "model_options": options},
        "measurement": {"parts": {"attention_s": seconds}},
    }


@pytest.mark.parametrize(
    "rows",
    [
        [row("dgx-h100", attention="flash_attention_3")],
        [row("dgx-h100", 0.0)],  # none at all, as of attention by scores
        [row("dgx-a100")],  # whose usual kernel is its file's default
        [row("l40s"), row("local")],
        [row("dgx-h100", model="tnl-1b")],  # of linear attention, which has no such option
    ],
)
def test_where_one_is_said_or_there_is_no_other_nothing_is_told(rows: list[dict[str, Any]]) -> None:
    assert default_attention(rows) == []


def test_the_kernel_that_is_taken_is_told_once_for_each_cluster() -> None:
    told = default_attention([row("dgx-h100"), row("dgx-h100", attention="flash"), row("dgx-a100")])
    assert told == ["flash_attention_2, the default of dgx-h100 (its programs usually run cudnn)"]
