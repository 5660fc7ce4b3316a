"""What a simulated step is made of, against answers known beforehand."""

from __future__ import annotations

import pytest

from spbench.bench.measure.simulator.program import ATTENTION, MATMUL, Group
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.step_parts import Flops
from tests.measure.simulator.step_programs import chain, cluster, everyone, ring, timed


def test_kernels_are_told_apart_by_their_kind() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=2, category=MATMUL)
    b.kernel("flash", flops=3, category=ATTENTION)
    b.kernel("softmax", nbytes=5, category=ATTENTION)  # computes nothing: it moves scores
    b.kernel("add", nbytes=7)
    b.on_stream(1)
    b.kernel("copy", nbytes=11)
    found = timed([b.program()], [[0]], cluster(memory=1))
    assert found.parts == {
        "matmul_s": 2,
        "attention_s": 3,
        "memory_bound_s": 12,
        "intra_node_s": 0,
        "inter_node_s": 0,
    }
    assert found.breakdown["compute_s"] == 17


def test_a_charge_for_blocks_is_a_part_of_products() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=2, strided=3, category=MATMUL)
    b.kernel("mm", flops=5, category=MATMUL)
    found = timed([b.program()], [[0]], strided_element_s=0.5)
    assert (found.parts["matmul_s"], found.parts["in_blocks_s"]) == (8.5, 1.5)


def test_ranks_of_several_programs_count_alike() -> None:
    programs, ranks = chain(4, 6, 0)
    found = timed(programs, ranks)
    assert found.parts["memory_bound_s"] == found.breakdown["compute_s"] == 6


def test_transfers_of_a_ring_leave_the_node_where_it_ends() -> None:
    """The second of four ranks on two nodes sends to the third, and the fourth to the first. A rank waits for
    its own send and for what it receives, of which one leaves the node."""
    found = timed([ring(4, 1, 8, overlap=False)], [range(4)], cluster(devices=2, node_bandwidth=2, nics=2))
    assert found.parts["inter_node_s"] > found.parts["intra_node_s"] > 0
    alone = timed([ring(4, 1, 8, overlap=False)], [range(4)], cluster(devices=4))
    assert alone.parts["inter_node_s"] == 0
    for each in (found, alone):
        both = each.parts["intra_node_s"] + each.parts["inter_node_s"]
        assert both == pytest.approx(each.breakdown["exposed_communication_s"])
    spread = timed([ring(4, 1, 8, overlap=False)], [range(4)])  # a device a node
    assert spread.parts["intra_node_s"] == 0


def pairs(stride: int) -> Group:
    """Groups of two of four ranks, neighbours or one apart."""
    return Group.of([0, stride], (1, 1, 2, 2))


@pytest.mark.parametrize(("stride", "across"), [(1, False), (2, True)])
def test_a_collective_is_across_nodes_where_its_members_are_on_several(stride: int, across: bool) -> None:
    b = ProgramBuilder((1, 1, 2, 2))
    b.wait(b.collective("all_gather", 4, pairs(stride)))
    found = timed([b.program()], [range(4)], cluster(devices=2))
    assert found.parts["inter_node_s" if across else "intra_node_s"] == found.step_time_s > 0


def test_waits_for_another_stream_are_across_nodes_while_it_sends_there() -> None:
    b = ProgramBuilder((1, 1, 2, 2))
    b.on_stream(1)
    b.kernel("copy", nbytes=3)
    b.wait(b.collective("all_gather", 8, pairs(1)))
    b.wait(b.collective("all_gather", 8, pairs(2)))
    point = b.record()
    b.on_stream(0)
    b.wait(point)
    found = timed([b.program()], [range(4)], cluster(devices=2, memory=1, node_bandwidth=2))
    whole = found.breakdown["exposed_communication_s"]
    assert whole == found.step_time_s
    outside = found.parts["inter_node_s"]
    assert 0 < outside < whole
    # the copy takes 3 s, and each collective as long as its links are slow
    inside = found.parts["intra_node_s"] - 3
    assert outside > inside > 0


def test_flops_are_told_apart_by_phase_and_kind() -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.kernel("outside", flops=100, category=MATMUL)
    for phase in ("forward", "backward", "forward"):
        b.phase(phase)
        b.kernel("mm", flops=2, category=MATMUL)
        b.kernel("flash", flops=3, category=ATTENTION)
        b.kernel("add", flops=50)
        b.wait(b.collective("all_reduce", 1, everyone(2)))
    assert timed([b.program()], [range(2)]).flops == Flops(
        2 * 2 * (2 + 3), 2 * 2 * 3, 2 * (100 + 3 * (2 + 3))
    )


def test_a_wait_for_a_stream_that_does_nothing_is_none() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.on_stream(1)
    point = b.record()
    b.on_stream(0)
    b.wait(point)
    assert timed([b.program()], [[0]]).breakdown["exposed_communication_s"] == 0
