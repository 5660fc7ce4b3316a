"""What NCCL takes of a device to connect it with the others of its node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.rank_memory import exchange_memory_bytes, usable_memory_bytes
from spbench.bench.measure.engines.virtual import VirtualEngine
from tests.measure.engines.cells import write_cluster

MIB = 2**20


def cell(cluster: str, strategy: str, **changes: Any) -> Cell:
    asked = {"model": "causal-transformer-tiny", "strategy": strategy, "batch": 4, "seq_len": 24}
    return Cell.model_validate(asked | {"cluster": cluster} | changes)


@pytest.fixture(scope="module")
def nodes_of_four(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(write_cluster(tmp_path_factory.mktemp("clusters"), 100))
    of_peer = f"  memory_peer_bytes: {{value: {5 * MIB}, source: made up}}\nnetwork:"
    path.write_text("devices_per_node: 4" + path.read_text().replace("network:", of_peer))
    return str(path)


@pytest.mark.parametrize(
    ("strategy", "sizes", "peers"),
    [
        ("ulysses", {"sp": 4}, 3),
        ("ulysses", {"sp": 12}, 3),
        ("ulysses", {"sp": 2}, 1),
        ("ulysses", {"sp": 2, "dp": 4}, 1),
        ("ring_attention", {"sp": 4}, 0),
        ("single", {"dp": 4}, 0),
        ("tensor_parallel+ulysses", {"tp": 2, "sp": 3}, 2),
    ],
)
def test_each_other_device_of_the_node_counts(
    strategy: str, sizes: dict[str, int], peers: int, nodes_of_four: str
) -> None:
    asked = cell(nodes_of_four, strategy, sizes=sizes)
    assert exchange_memory_bytes(asked) == peers * 5 * MIB
    assert usable_memory_bytes(asked) == (100 - 5 * peers) * MIB


def test_ranks_of_other_nodes_do_not_count(nodes_of_four: str) -> None:
    """Every other rank is in a group: two of three are in the first node."""
    asked = cell(nodes_of_four, "tensor_parallel+ulysses", sizes={"tp": 2, "sp": 3})
    every_other = asked.model_copy(update={"mesh": ("pp", "dp", "cp", "sp", "tp")})
    assert exchange_memory_bytes(every_other) == 5 * MIB


def test_rows_have_what_is_left(nodes_of_four: str) -> None:
    row = VirtualEngine().measure(cell(nodes_of_four, "ulysses", sizes={"sp": 4}))
    assert row.usable_memory_bytes == 85 * MIB


def test_a_cluster_need_not_know(tmp_path: Path) -> None:
    asked = cell(write_cluster(tmp_path, 100), "ulysses", sizes={"sp": 4})
    assert exchange_memory_bytes(asked) is None
    assert usable_memory_bytes(asked) == 100 * MIB
