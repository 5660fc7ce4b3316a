"""All-to-alls that permute on the way: the same bits and bytes, and no time saved but that of the copies."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.virtual import VirtualEngine, trace_classes
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.collectives import all_to_all
from spbench.impls.layout import Unsupported
from spbench.impls.strategies.ulysses import fused_all_to_all
from tests.cells import make_cell


def both_ways(mesh: DeviceMesh) -> list[list[torch.Tensor]]:
    """By all-to-all: positions for heads, heads for positions, and the gradient of the input."""
    group, found = mesh.get_group("sp"), []
    for exchange in (all_to_all, fused_all_to_all):
        generator = torch.Generator().manual_seed(group.rank())
        x = torch.randn(2, 3, 4, 5, generator=generator).bfloat16().requires_grad_()
        swapped = exchange(x.transpose(1, 2), 1, 2, group)
        back = exchange(swapped * 3, 2, 1, group)
        (d_x,) = torch.autograd.grad(back, x, torch.randn(back.shape, generator=generator).bfloat16())
        found.append([swapped.detach(), back.detach(), d_x])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_the_same_bit_by_bit(pool: RankPool, ranks: int) -> None:
    for copied, fused in pool.run({"sp": ranks}, both_ways):
        for a, b in zip(copied, fused, strict=True):
            assert torch.equal(a, b)


def cell(ranks: int, fused: bool) -> Cell:
    """The call of fast-ulysses' table: 40 heads of 128, 75,600 positions in all."""
    return make_cell(
        *("attention-call", "ulysses", {"sp": ranks}, 1, 75_600),
        model_options={"heads": 40, "kv_heads": 40},
        strategy_options={"fused_exchange": fused},
        cluster="h200-sxm",
        training={"step": "inference"},
    )


@pytest.mark.parametrize(
    ("ranks", "copying_rate", "fused_rate"), [(2, 171, 355), (4, 202, 301), (8, 203, 301)]
)
def test_what_is_saved_is_the_time_of_the_copies(ranks: int, copying_rate: int, fused_rate: int) -> None:
    """Rates in GB/s a rank: triple-mu/fast-ulysses 00e2354e, README.md, by NCCL and by its kernel."""
    engine, asked = VirtualEngine(), [cell(ranks, fused) for fused in (False, True)]
    copying, fused = (engine.measure(each) for each in asked)
    assert copying.communication == fused.communication
    assert fused.formula_difference == []
    assert copying.peak_memory_bytes == fused.peak_memory_bytes
    timelines = [trace_classes(each, events=True).simulator()() for each in asked]
    events = [[*timeline.events(0)] for timeline in timelines]
    ends = [max(event.start_s + event.duration_s for event in each) for each in events]
    copies = [[event.duration_s for event in each if event.name == "clone"] for each in events]
    assert (len(copies[0]), copies[1]) == (7, [])
    saved = sum(copies[0])
    assert 0.85 * saved < ends[0] - ends[1] <= saved  # the host begins the first message later
    exchange = max(event.duration_s for event in events[1] if event.name == "all_to_all")
    sent = 75_600 // ranks * 40 * 128 * 2 * (ranks - 1) / ranks
    assert exchange + 2 * copies[0][0] == pytest.approx(sent / copying_rate / 1e9, rel=0.06)
    assert exchange == pytest.approx(sent / fused_rate / 1e9, rel=0.25)


def test_ranks_of_several_nodes_are_refused() -> None:
    with pytest.raises(Unsupported, match="needs 20 ranks in one node, which has 8") as refused:
        plan(cell(20, True))
    assert "give the axis fewer ranks" in str(refused.value.args)
    plan(cell(20, False))
