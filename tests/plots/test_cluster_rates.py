"""The figure of a cluster's rates."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.plots.cluster_rates import cluster_rates
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES
from tests.plots.drawn import assert_nothing_overlaps, points


def curve(along: str, panel: str, name: str, *rates: float, **measured: float) -> dict[str, Any]:
    sizes = [2 ** (20 + n) for n in range(len(rates))]
    points_of = {int(size[1:]): rate for size, rate in measured.items()}
    return {
        "along": along,
        "panel": panel,
        "name": name,
        "sizes": sizes,
        "rates": rates,
        "measured": points_of,
    }


CURVES = [
    curve("size", "Matrix products", "bf16", 1e12, 3e12, _1048576=2e12),
    curve("message", "Within a node", "all_reduce", 1e9, 2e9),
    curve("message", "Within a node", "all_gather", 1e9, 2e9),
    curve("message", "Within a node", "send", 4e9, 5e9),
]


@pytest.mark.parametrize("width", [PAGE_INCHES, COLUMN_INCHES])
def test_what_reaches_the_same_is_one_line(width: float) -> None:
    figure = cluster_rates(CURVES, "A cluster").draw(width)
    assert_nothing_overlaps(figure)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == ["Matrix products", "Within a node"]
    assert points(figure, "Matrix products bf16") == [(2**20, 1), (2**21, 3)]
    assert points(figure, "measured Matrix products bf16") == [(2**20, 2)]
    assert points(figure, "Within a node all-reduce, all-gather") == [(2**20, 1), (2**21, 2)]
    assert points(figure, "Within a node send") == [(2**20, 4), (2**21, 5)]
