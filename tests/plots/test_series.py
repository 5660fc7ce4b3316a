"""How rows are told apart: the settings in which those of a strategy differ."""

from __future__ import annotations

from typing import Any

from spbench.plots.series import differing_settings
from tests.plots.rows import searched


def test_orders_of_the_mesh_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [searched("ring_self_attention", 8, 1000) for _ in range(2)]
    for row, mesh in zip(rows, (None, ["sp", "dp"]), strict=True):
        row["cell"] |= {"sizes": {"dp": 2, "sp": 8}, "mesh": mesh}
    text = differing_settings(rows)
    assert [text(row) for row in rows] == ["mesh default", "mesh sp dp"]
