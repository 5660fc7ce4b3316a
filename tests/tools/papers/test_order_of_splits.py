"""The order of splits, by published and by simulated times."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.tools.papers.past_errors import Order, mean_tau, order_lines, shown_tau


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 2), (2, 1), (3, 3)], 1 / 3),
        # two pairs are in order and one is a tie of ours, so of the three of theirs only two could be
        ([(1, 5), (2, 5), (3, 6)], 2 / math.sqrt(3 * 2)),
    ],
)
def test_tau(pairs: list[tuple[float, float]], tau: float) -> None:
    assert Order("t", [(cell(), *pair) for pair in pairs]).tau == pytest.approx(tau)


def test_where_all_are_ties_there_is_no_order() -> None:
    same = Order("t", [(cell(), 1, 5), (cell(), 2, 5)])
    assert shown_tau(same.tau) == ""
    right = Order("t", [(cell(), 1, 5), (cell(), 2, 6)])
    assert mean_tau([same, right]) == 1
    assert math.isnan(mean_tau([same]))


def cell(**changes: Any) -> Cell:
    asked = {"model": "bert-tiny", "strategy": "ulysses", "sizes": {"sp": 4}, "batch": 1, "seq_len": 64}
    return Cell.model_validate(asked | changes)


def record(of: Cell, published: float | None, ours: float | None) -> dict[str, Any]:
    return {
        "cell": of.key,
        "table": "t: x",
        "quantity": "step_time_ms",
        "published": published,
        "reproduced": ours,
    }


def test_splits_of_one_run_are_set_in_order() -> None:
    """Times are by sample: two replicas of two ranks take 30 for two samples, so 15."""
    split = [cell(), cell(strategy="ring_attention"), cell(sizes={"dp": 2, "sp": 2}, batch=2)]
    other = cell(seq_len=128)  # of which there is one split
    elsewhere = cell(cluster="dgx-a100")  # likewise
    records = [record(of, *times) for of, times in zip(split, [(10, 12), (20, 11), (30, 40)], strict=True)]
    (line,) = order_lines(
        [*records, record(other, 1, 1), record(elsewhere, 1, 1)],
        {c.key: c for c in (*split, other, elsewhere)},
    )
    assert (line["table"], line["seq_len"], line["GPUs"], line["splits"]) == ("t", 64, 4, 3)
    assert line["tau"] == "-0.33"
    assert (line["fastest published"], line["fastest ours"]) == ("sp4", "sp4")
    assert line["published time of ours"] == "+100.0%"


def test_splits_without_a_time_and_recomputation_are_no_splits() -> None:
    again = cell(model="causal-transformer-tiny", model_options={"recompute": "full"})
    plain = cell(model="causal-transformer-tiny", model_options={"recompute": "none"})
    ring = cell(strategy="ring_attention")
    records = [record(again, 1, 2), record(plain, 2, 3), record(cell(), 1, 2), record(ring, None, 3)]
    assert order_lines(records, {c.key: c for c in (again, plain, cell(), ring)}) == []
