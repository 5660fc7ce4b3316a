"""Where the best layout turns into another one, in words."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.advise.behind import turns, varying


def point(strategy: str, **more: Any) -> dict[str, Any]:
    return {"gpus": 8, "seq_len": 8192, "figures": "", "tie": False, **more, "strategy": strategy}


def test_runs_of_one_strategy_and_ties_are_said() -> None:
    points = [
        point("single", seq_len=8192),
        point("single", seq_len=16384, tie=True),
        point("ulysses", seq_len=32768),
        point("ulysses", seq_len=65536),
        point("", seq_len=2**20),
    ]
    (line,) = turns(points)
    found, ties = line.split("; ")
    assert found == "single from 8K to 16K, ulysses from 32K to 64K, nothing fits at 1M"
    assert ties == "a tie with another strategy at 16K"


def test_a_line_for_each_value_of_what_varies_second() -> None:
    points = [
        point("single" if gpus == 8 else "lasp", seq_len=n, gpus=gpus) for n in (1, 2) for gpus in (8, 64)
    ]
    assert [*turns(points)] == ["8 GPUs: single from 1 on", "64 GPUs: lasp from 1 on"]


def test_a_figure_is_walked_along() -> None:
    name = "network.bandwidth_bytes_per_s"
    points = [point("ring_attention", figures=f"{name}=x1"), point("ulysses", figures=f"{name}=x2")]
    assert [*turns(points)] == [f"ring_attention at {name}=x1, ulysses at {name}=x2"]
    assert [*turns(points[:1])] == []


def test_three_things_at_once_have_no_map() -> None:
    points = [point("single"), point("single", gpus=16, seq_len=1, figures="x")]
    with pytest.raises(UserError, match="two of these at most"):
        varying(points)
