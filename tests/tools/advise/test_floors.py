"""Floors of steps: bytes at the bandwidth of the links, by the places of a group's ranks."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.advise.collective_prices import compute_floor_s, links_floor_s
from tests.tools.advise.questions import asked

H100 = load_cluster("dgx-h100")  # eight cards and eight network cards a node
assert H100.node_link is not None
NODE = H100.node_link.bandwidth_bytes_per_s.value or 0.0
CARD = H100.network.bandwidth_bytes_per_s.value or 0.0
SENT = 2**30


def cell(**sizes: int) -> Cell:
    made = asked(8, cluster="dgx-h100").cell
    return Cell.model_validate({**made.model_dump(exclude_defaults=True), "sizes": sizes})


def floor(made: Cell, axis: str, collective: str) -> float | None:
    row = {"axis": axis, "collective": collective, "sent_bytes": SENT}
    return links_floor_s(made, {"formula": [row]})


@pytest.mark.parametrize(
    ("sizes", "axis", "collective", "seconds"),
    [
        ({"tp": 8}, "tp", "all_reduce", SENT / NODE),
        ({"dp": 16}, "dp", "all_reduce", SENT / min(NODE, 8 * CARD)),  # a ring leaves a node by all cards
        ({"dp": 2, "tp": 8}, "dp", "all_reduce", SENT / CARD),  # one rank of the group in each node
        ({"sp": 16}, "sp", "all_to_all", SENT * 8 / 15 / CARD),  # to 8 of 15 others across nodes
        ({"sp": 16}, "sp", "send", SENT / CARD),  # one message, one card
        ({"dp": 2, "sp": 8}, "dp_sp", "all_gather", SENT / min(NODE, 8 * CARD)),
    ],
)
def test_bytes_at_the_links(sizes: dict[str, int], axis: str, collective: str, seconds: float) -> None:
    assert floor(cell(**sizes), axis, collective) == pytest.approx(seconds)


def test_links_work_at_the_same_time() -> None:
    rows = [{"axis": axis, "collective": "all_reduce", "sent_bytes": SENT} for axis in ("dp", "tp")]
    assert links_floor_s(cell(dp=2, tp=8), {"formula": rows}) == pytest.approx(SENT / CARD)


def test_a_card_without_links_has_no_floor_of_them() -> None:
    made: dict[str, Any] = asked(8).cell.model_dump(exclude_defaults=True)
    local = Cell.model_validate({**made, "cluster": "local", "sizes": {"dp": 2}})
    assert floor(local, "dp", "all_reduce") is None
    assert links_floor_s(local, {"formula": []}) == 0.0


def test_the_floor_of_computing_is_that_of_the_datasheet() -> None:
    assert compute_floor_s({"mfu": 0.4, "step_time_s": 2.0}) == pytest.approx(0.8)
    assert compute_floor_s({"mfu": None, "step_time_s": 2.0}) is None
