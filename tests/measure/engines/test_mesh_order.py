"""The order of the mesh: the same bytes and memory on other ranks, and so other times between nodes."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell, Timing
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool

#: replicas across two nodes of eight, sequences inside; and the reverse
ORDERS = REPLICAS_OUTSIDE, SEQUENCES_OUTSIDE = ["dp", "sp"], ["sp", "dp"]
#: attention outweighs the sum of gradients, so that sequences inside a node are the better order
WORK = {"layers": 2, "hidden": 256, "heads": 16, "inner": 256}


def cell(mesh: list[str], strategy: str = "ring_attention", **changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "tnl-tiny" if strategy == "lasp" else "causal-transformer-tiny",
        "strategy": strategy,
        "sizes": {"dp": 2, "sp": 8},
        "mesh": mesh,
        "batch": 4,
        "seq_len": 8192,
        "precision": "bf16",
        "cluster": "dgx-a100-datasheet",
        "model_options": WORK if strategy != "lasp" else {},
    }
    return Cell.model_validate(settings | changes)


def test_an_axis_across_nodes_takes_longer_and_sends_and_holds_the_same() -> None:
    inside, outside = (VirtualEngine().measure(cell(mesh)) for mesh in ORDERS)
    assert inside.status == outside.status == "ok"
    assert inside.step_time_s is not None
    assert outside.step_time_s is not None
    assert outside.step_time_s > 1.2 * inside.step_time_s
    # a mean over ranks, which are summed in another order
    assert inside.breakdown["compute_s"] == pytest.approx(outside.breakdown["compute_s"], rel=1e-12)
    for field in ("communication", "formula", "peak_memory_bytes", "reserved_memory_bytes", "peak_held"):
        assert getattr(inside, field) == getattr(outside, field), field


def test_on_one_node_the_order_makes_no_difference() -> None:
    """All links are alike there, so that it is the nodes that make one."""
    on_one = {"sizes": {"dp": 2, "sp": 4}}
    first, second = (VirtualEngine().measure(cell(mesh, **on_one)) for mesh in ORDERS)
    assert first.step_time_s == pytest.approx(second.step_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("mesh", "replicas", "chunks"),
    [(REPLICAS_OUTSIDE, [3, 11], [*range(8)]), (SEQUENCES_OUTSIDE, [6, 7], [*range(1, 16, 2)])],
    ids=["dp outside", "sp outside"],
)
def test_collectives_are_simulated_among_the_ranks_of_their_groups(
    mesh: list[str], replicas: list[int], chunks: list[int]
) -> None:
    """The two replicas of sequence rank 3, and all sequence ranks of the replica of the last rank."""
    traces = virtual.trace_classes(cell(mesh, "ulysses", seq_len=128), events=True)
    timeline = traces.simulator()()

    def groups(rank: int) -> set[tuple[int, ...]]:
        parties = (event.details.get("ranks") for event in timeline.events(rank))
        return {tuple(ranks) for ranks in parties if ranks}

    assert tuple(replicas) in groups(replicas[0])
    assert tuple(chunks) in groups(chunks[-1])


def test_ranks_of_a_class_are_those_of_the_order() -> None:
    """The last of LASP's ranks sends no state; each class has both replicas."""
    by_order = [[each.ranks for each in rank_classes(cell(mesh, "lasp"))] for mesh in ORDERS]
    assert by_order[0][-1] == (7, 15)
    assert by_order[1][-1] == (14, 15)
    for classes in by_order:
        assert sorted(rank for ranks in classes for rank in ranks) == [*range(16)]


@pytest.mark.slow
def test_real_ranks_meter_the_same_in_both_orders(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LASP's last ranks send no state; were they others than planned, bytes would differ from the closed
    form."""
    small = {
        "engine": "distributed",
        "sizes": {"dp": 2, "sp": 2},
        "seq_len": 24,
        "precision": "fp32",
        "cluster": "local",
        "timing": Timing(warmup=0, samples=1),
        "model_options": {},
    }
    launch = "spbench.bench.measure.engines.distributed.launch"  # the ranks of the pool in place of new ones
    monkeypatch.setattr(launch, lambda cell, work: dict(enumerate(pool.run(cell.mesh_sizes, work, cell))))
    one, other = (DistributedEngine().measure(cell(mesh, "lasp", **small)) for mesh in ORDERS)
    expected = VirtualEngine().measure(cell(SEQUENCES_OUTSIDE, "lasp", **small))
    assert one.status == other.status == "ok"
    assert one.communication == other.communication == expected.communication
    assert one.formula == other.formula
    assert one.formula_difference == other.formula_difference == []
