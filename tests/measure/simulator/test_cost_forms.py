"""Costs of kernels and collectives against values worked out by hand; they never fall as bytes grow. Calls
priced by tables of measured rates: on a measured call, turned, beyond the table, and in words."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.clusters.cluster import Calibration, Cluster, cluster_names, load_cluster
from spbench.bench.measure.clusters.rate_tables import collective_tables, table_text
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import Category, Kind, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.substitutes import kernel_substitutes
from spbench.bench.measure.simulator.table_prices import groups_of
from spbench.bench.measure.trace.operator_prices import price_of
from tests.measure.simulator.step_programs import cluster, of_links, timed


def changed(on: Cluster, path: str, value: Any) -> Cluster:
    """The cluster with another value at a key path; a plain number becomes a figure."""
    document = on.model_dump()
    *parents, last = path.split(".")
    part = document
    for key in parents:
        part = part[key]
    part[last] = {"value": value, "source": "made up"} if isinstance(value, float) else value
    return Cluster.model_validate(document)


# -- kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flops", "nbytes", "seconds"), [(8, 4, 4.0), (0, 100, 10.0), (1, 1, 2.0)])
def test_a_kernel_takes_at_least_the_floor(flops: float, nbytes: float, seconds: float) -> None:
    on = changed(cluster(rate=2, memory=10), "device.kernel_floor_s", 2.0)
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("x", flops=flops, nbytes=nbytes)
    b.kernel("x", flops=flops, nbytes=nbytes)
    found = timed([b.program()], [[0]], on)
    assert found.step_time_s == 2 * seconds
    assert found.breakdown["compute_s"] == 2 * seconds
    assert found.breakdown["overhead_s"] == 0


def test_attention_has_an_efficiency_of_its_own() -> None:
    """Which replaces that of matmuls; elsewhere both are the calibration's."""
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=3, category=Category.MATMUL)
    b.kernel("flash", flops=5, category=Category.ATTENTION)
    one = [b.program()], [[0]]
    plain = cluster()
    own = changed(plain, "device.attention_efficiency", 0.25)
    assert timed(*one, plain, compute_efficiency=0.5).step_time_s == 6 + 10
    assert timed(*one, own, compute_efficiency=0.5).step_time_s == 6 + 20


def test_kernels_reach_a_share_of_the_memory_bandwidth() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("add", nbytes=5)
    on = changed(cluster(memory=1), "device.memory_efficiency", 0.5)
    assert timed([b.program()], [[0]], on).step_time_s == 10
    assert timed([b.program()], [[0]], on, memory_efficiency=0.5).step_time_s == 20


# -- collectives -------------------------------------------------------------------------------------------


def rate(latency: float, bandwidth: float, ranks: int | None = None, per_rank: float = 0.0) -> dict[str, Any]:
    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "source": "made up"}

    return {
        "ranks": ranks,
        "latency_s": figure(latency),
        "latency_per_rank_s": figure(per_rank),
        "bandwidth_bytes_per_s": figure(bandwidth),
    }


def measured() -> Cluster:
    """Nodes of four devices with two cards of 4 bytes a second, and rates of one, two and four devices."""
    document = cluster(devices=4, nics=2, bandwidth=4.0, latency=0.5, node_bandwidth=99.0).model_dump()
    document["collective_model"] = "measured"
    document["node_link"]["collectives"] = {
        "any": [rate(1.0, 10.0, 2), rate(2.0, 20.0, 4)],
        "all_gather": [rate(1.0, 16.0, per_rank=3.0)],
    }
    return Cluster.model_validate(document)


def seconds(on: Cluster, kind: str, nbytes: float, *groups: list[int], **scalars: Any) -> float:
    return max(Costs(on, Calibration(**scalars)).collectives(kind, nbytes, groups))


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce", 2, 1 + 80 / 10),  # 2 (n - 1) / n of the bytes
        ("all_reduce", 3, 1 + 80 * 4 / 3 / 10),  # the rate of two, the largest size that is not larger
        ("all_reduce", 4, 2 + 80 * 1.5 / 20),
        ("all_to_all", 4, 2 + 80 * 0.75 / 20),
        ("all_gather", 4, 1 + 3 * 3 + 80 * 0.75 / 16),
        ("barrier", 4, 2),
    ],
)
def test_measured_rates_within_a_node(kind: str, ranks: int, expected: float) -> None:
    assert seconds(measured(), kind, 80, list(range(ranks))) == pytest.approx(expected)


def test_measured_rates_between_nodes() -> None:
    """Rings leave a node by all its cards, or by the group's share of them; latency as of a tree of nodes."""
    on = measured()
    alone = seconds(on, "all_reduce", 80, list(range(8)))
    assert alone == pytest.approx(2 + 2 * 0.5 + 80 * 2 * 7 / 8 / (2 * 4))
    four = [[i, i + 4, i + 8, i + 12] for i in range(4)]
    assert seconds(on, "all_reduce", 80, *four) == pytest.approx(2 * 2 * 0.5 + 80 * 1.5 / (4 * 2 / 4))
    half = seconds(on, "all_reduce", 80, list(range(4)), link_efficiency=0.5)
    assert half == pytest.approx(2 + 80 * 1.5 / 10)


def test_measured_all_to_alls_between_nodes() -> None:
    """Of 16 pieces, 12 leave each device's node at its half of a card; the latency counts once."""
    on = changed(measured(), "network.collectives", {"all_to_all": [rate(3.0, 4.0, 2), rate(5.0, 8.0, 4)]})
    world = list(range(16))
    assert seconds(on, "all_to_all", 160, world) == pytest.approx(5 + 12 * 10 / (8 * 2 / 4))
    assert seconds(on, "all_to_all", 80, world[:8]) == pytest.approx(3 + 4 * 10 / (4 * 2 / 4))
    by_sends = seconds(measured(), "all_to_all", 160, world)
    assert by_sends == pytest.approx(12 * (0.5 + 10 / (4 * 2 / 4)))


def test_rings_between_nodes_take_longer_with_each_rank() -> None:
    """NCCL gathers by rings alone, by the protocol with which a message takes least; a measured rate of the
    network stands in its place."""
    on = changed(measured(), "network.latency_s", 0.0)
    us = 1e-6
    # of 16 ranks on 4 nodes 3 hops leave a node and 12 do not; 15 / 16 of the bytes at 8 a second
    by_ll128 = (14 + 12 * 1.9 + 3 * 4) * us + 8e-6 * 15 / 16 / 8 / 0.92
    assert seconds(on, "all_gather", 8e-6, list(range(16))) == pytest.approx(by_ll128)
    by_simple = (8.4 + 12 * 3.4 + 3 * 14) * us + 80 * 15 / 16 / 8
    assert seconds(on, "reduce_scatter", 80, list(range(16))) == pytest.approx(by_simple)
    # each rank passes a broadcast on
    assert seconds(on, "broadcast", 0, list(range(16))) == pytest.approx((14 + 16 * 4) * us)
    hops = [seconds(on, "all_gather", 0, list(range(4 * nodes))) for nodes in (2, 4, 8)]
    assert hops[2] - hops[1] == pytest.approx(2 * (hops[1] - hops[0]))
    on = changed(on, "network.collectives", {"all_gather": [rate(1.0, 8.0, 2)]})
    assert seconds(on, "all_gather", 0, list(range(16))) == pytest.approx(
        1 + 3 * 3 + 1
    )  # a node's, and its own


def test_rates_are_in_ascending_order_of_ranks() -> None:
    with pytest.raises(ValueError, match="ascending"):
        changed(measured(), "node_link.collectives.any", [rate(1.0, 1.0, 4), rate(1.0, 1.0, 2)])


def nccl(channels: float | None = None, **settings: Any) -> Cluster:
    """Nodes of eight devices with 240 GB/s links and eight cards of 25 GB/s."""
    document = cluster(devices=8, nics=8, node_bandwidth=240e9, bandwidth=25e9).model_dump()
    document["collective_model"] = "nccl"
    document["nccl"] = {"generation": "ampere", **settings}
    if channels:
        document["nccl"]["channels"] = {"value": channels, "source": "made up"}
    return Cluster.model_validate(document)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        # ring, LL: 14 hops of 0.6 us after 6.6; half of the 240 GB/s, at most 87.7
        (4096, 6.6 + 14 * 0.6 + 4096 / (87.7e3 * 8 / 14)),
        # ring, Simple, of large messages: 14 hops of 3.4 us after 8.4, all of the 240 GB/s
        (2**30, 8.4 + 14 * 3.4 + 2**30 / (240e3 * 8 / 14)),
    ],
)
def test_ring_protocols_of_nccl(nbytes: float, expected: float) -> None:
    on = nccl(algorithms=["ring"])
    assert seconds(on, "all_reduce", nbytes, list(range(8))) == pytest.approx(expected * 1e-6)


def test_small_all_reduces_over_many_nodes_go_by_trees() -> None:
    """LL: 6.8 us, twice 7 hops in a node and 3 between 8 nodes, where a ring has 14 hops between them; 1024
    bytes reach 90% of half the bandwidth."""
    world = list(range(64))
    tree = 6.8 + 2 * (7 * 0.6 + 3 * 5.0) + 1024 / (0.9 * 0.5 * 20.4e3)
    assert seconds(nccl(), "all_reduce", 1024, world) == pytest.approx(tree * 1e-6)
    assert seconds(nccl(algorithms=["ring"]), "all_reduce", 1024, world) > tree * 1e-6
    # nothing else goes by trees
    for kind in ("all_gather", "reduce_scatter", "broadcast"):
        by_rings = seconds(nccl(algorithms=["ring"]), kind, 1024, world)
        assert seconds(nccl(), kind, 1024, world) == by_rings


def test_channels_limit_what_protocols_reach() -> None:
    """One channel of LL128 has 20 GB/s on this generation, less than 92% of the link."""
    one, world = nccl(1, algorithms=["ring"], protocols=["ll128"]), list(range(8))
    found = seconds(one, "all_gather", 2**24, world)
    assert found == pytest.approx((14 + 7 * 1.9 + 2**24 / (20e3 * 8 / 7)) * 1e-6)


KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "barrier"]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ranks=st.sampled_from([2, 4, 8, 16, 32]),
    nbytes=st.floats(0, 2**31),
    more=st.floats(1, 4),
    on=st.sampled_from([cluster(devices=4), measured(), nccl(), nccl(12, algorithms=["tree"])]),
)
def test_more_bytes_never_take_less_time(
    kind: str, ranks: int, nbytes: float, more: float, on: Cluster
) -> None:
    members = list(range(ranks))
    assert seconds(on, kind, nbytes, members) <= seconds(on, kind, nbytes * more, members) * (1 + 1e-12)


def test_the_clusters_of_the_papers_are_timed_as_before() -> None:
    """By rings, the roofline and their calibrations alone."""
    for name in (
        "piz-daint-p100",
        "a100-lasp",
        "dgx-a100-datasheet",
        "dgx-h100-datasheet",
        "dgx-v100-datasheet",
        "h800-datasheet",
        "local",
    ):
        assert name in cluster_names()
        on = load_cluster(name)
        device = on.device
        assert on.collective_model == "ring"
        assert device.kernel_floor_s.value is None
        assert device.attention_efficiency.value is None
        assert device.memory_efficiency.value is None


def test_a_part_of_a_node_may_leave_by_one_card() -> None:
    """Four cards of 4 bytes a second: half a node by two of them, or by one; whole nodes and single devices
    are the same either way."""
    on = cluster(devices=4, nics=4, bandwidth=4.0, node_bandwidth=99.0)
    by_one = changed(on, "network.one_card_a_part", True)
    half, whole, single = [0, 1, 4, 5], list(range(8)), [0, 4]
    assert seconds(on, "all_gather", 80, half) == pytest.approx(60 / (4 * 2))
    assert seconds(by_one, "all_gather", 80, half) == pytest.approx(60 / 4)
    assert seconds(on, "all_to_all", 80, half) == pytest.approx(2 * 20 / 4)
    assert seconds(by_one, "all_to_all", 80, half) == pytest.approx(2 * 20 / 2)
    for group in (whole, single):
        assert seconds(by_one, "all_gather", 80, group) == seconds(on, "all_gather", 80, group)


H200 = load_cluster("h200-sxm")


def program_of(*calls: tuple[object, tuple[object, ...], object]) -> Program:
    b = ProgramBuilder((1, 1, 1, 1))
    for func, args, result in calls:
        price = price_of(func)
        b.add_kernel((Kind.KERNEL, b.named(price.name), *price.of(args, {}, result)))
    return b.program()


def matmul(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[object, ...]:
    a, b, c = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n), (m, n)))
    return torch.ops.aten.mm.default, (a, b), c


def attention(batch: int, heads: int, groups: int, length: int) -> tuple[object, ...]:
    q, k = (torch.empty(batch, n, length, 128, dtype=torch.bfloat16, device="meta") for n in (heads, groups))
    lse = torch.empty(batch, heads, length, device="meta")
    return torch.ops.spbench.flash_attention.default, (q, k, k, 1.0, True), (torch.empty_like(q), lse)


def by_table(*calls: tuple[object, ...], kernel: str = "flash_attention_3") -> list[float]:
    program = program_of(*calls)  # type: ignore[arg-type]
    return Costs(H200, Calibration(), attention=kernel).kernels(program).tolist()


def test_a_measured_matmul_takes_what_it_took_and_so_does_its_transpose() -> None:
    own, turned = by_table(matmul(8192, 1024, 4096), matmul(1024, 8192, 4096))
    alone = measured_us("h200_sxm-matmul", "8192,1024,4096") / 1e6
    assert own == pytest.approx(turned) == pytest.approx(alone / 0.90)  # of which a step keeps 0.90


def test_matmuls_of_rows_that_are_not_aligned_take_as_long_as_the_card_took() -> None:
    words = [matmul(8192, n, 4096) for n in (100352, 100280, 100278, 100277)]
    aligned, eights, twos, odd = by_table(*words)
    assert eights == pytest.approx(aligned, rel=0.01)
    # milliseconds of results/gpu/2026-11-27-nvidia-h200-third/unaligned_matmul.csv beside those of 100,352
    assert twos / aligned == pytest.approx(23.42 / 9.533, rel=0.12)
    assert odd / aligned == pytest.approx(67.01 / 9.533, rel=0.25)
    # tokens are no row of anything that forward reads or writes
    assert by_table(matmul(8191, 4096, 4096)) == pytest.approx(by_table(matmul(8192, 4096, 4096)), rel=0.01)


def test_a_card_without_a_rate_of_unaligned_rows_says_so() -> None:
    program = program_of(matmul(8192, 100278, 4096), matmul(8192, 100280, 4096))  # type: ignore[arg-type]
    by_card = {name: Costs(load_cluster(name), Calibration()) for name in ("h200-sxm", "dgx-a100")}
    unaligned = {
        name: [
            e.tolist()
            for each, e in kernel_substitutes(costs, program)
            if "unaligned" in each.work and len(e)
        ]
        for name, costs in by_card.items()
    }
    assert unaligned == {"h200-sxm": [], "dgx-a100": [[0]]}


def test_a_table_of_which_nobody_knows_what_a_step_keeps_is_named() -> None:
    words = kernel_substitutes(
        Costs(load_cluster("h100-sxm-alone"), Calibration()),
        program_of(matmul(8192, 1024, 4096)),  # type: ignore[arg-type]
    )
    assert ("bf16 matmuls", "its table of short calls, without a power limit", "extrapolated") in [
        tuple(each) for each, events in words if len(events)
    ]


def measured_us(table: str, sizes: str) -> float:
    """Microseconds of the call of these sizes, as the file has them."""
    lines = table_text(table).splitlines()
    return next(float(line.rpartition(",")[2]) for line in lines if line.startswith(f"{sizes},"))


def test_beyond_the_table_a_matmul_of_eight_times_the_rows_takes_about_eight_times_as_long() -> None:
    within, beyond = by_table(matmul(16384, 4096, 4096), matmul(131072, 4096, 4096))
    assert beyond == pytest.approx(8 * within, rel=0.02)
    words = list(kernel_substitutes(Costs(H200, Calibration()), program_of(matmul(131072, 4096, 4096))))  # type: ignore[arg-type]
    named = [tuple(each) for each, events in words if len(events)]
    assert named == [("bf16 matmuls", "the nearest of its table", "extrapolated")]


def test_attention_goes_by_its_length_heads_and_groups() -> None:
    call = program_of(attention(2, 16, 4, 4096))  # type: ignore[arg-type]
    assert groups_of(call, 0) == 8  # of both samples
    (own,) = by_table(attention(2, 16, 4, 4096))
    assert own == pytest.approx(measured_us("h200_sxm-flash_attention_3", "4096,32,8") / 1e6)


def test_other_kernels_precisions_and_cards_go_by_their_figures() -> None:
    (by_figure,) = by_table(attention(1, 32, 8, 4096), kernel="cudnn")
    assert by_figure == pytest.approx(2 * 128 * 32 * 4096 * 4097 / (583.1e12 / (1 + 325 / 4096)))
    (single,) = by_table(matmul(8192, 1024, 4096, torch.float32))
    assert single == pytest.approx(2 * 8192 * 1024 * 4096 / 66.9e12)


def test_collectives_of_a_node_take_what_they_took_and_grow_beyond() -> None:
    costs, table = Costs(H200, Calibration()), collective_tables("h200_sxm-collectives")["all_gather"]
    number = table.sizes.tolist().index([8.0, 2.0**20])
    (own,) = costs.collectives("all_gather", 2.0**20, [range(8)])
    assert own == pytest.approx(table.seconds[number])
    largest, twice = (costs.collectives("all_gather", size, [range(8)])[0] for size in (2.0**29, 2.0**30))
    assert twice == pytest.approx(2 * largest, rel=0.01)
    # without one of its own a broadcast keeps its figures; over nodes the network is the slower part
    assert costs.collectives("broadcast", 2.0**29, [range(8)])[0] > 0
    assert costs.collectives("all_gather", 2.0**29, [range(16)])[0] > own


def test_groups_larger_than_those_of_the_table_and_tables_of_other_machines_are_named() -> None:
    of_four = ("all_to_all intra-node", "its rate of 4 ranks", "extrapolated")
    assert of_four in of_links(load_cluster("gb300-nvl72"), 8)
    assert of_four not in of_links(load_cluster("gb300-nvl72"), 4)
    assert [work for work, _, _ in of_links(H200, 8)] == []
    # an L20 has the table of an L40S
    by = [by for work, by, _ in of_links(load_cluster("l20"), 8) if work == "all_to_all intra-node"]
    assert by == ["an L40S's"]


def test_a_node_of_pcie_cards_is_slower_the_more_of_it_a_group_has() -> None:
    """Eight L40S hang on two sockets: two, four and eight of them exchange at about 22, 5 and 2 GB/s."""
    costs, size = Costs(load_cluster("l40s"), Calibration()), 2.0**29
    rates = [
        (n - 1) / n * size / costs.collectives("all_to_all", size, [range(n)])[0] / 1e9 for n in (2, 4, 8)
    ]
    assert rates == pytest.approx([22.3, 4.5, 2.0], rel=0.03)


@pytest.mark.parametrize("name", ["b300-sxm", "gb300-nvl72", "rtx-a6000", "l4", "mi300x"])
def test_new_cards_are_timed_and_say_what_they_lack(name: str) -> None:
    on = load_cluster(name)
    program = program_of(matmul(4096, 4096, 4096), attention(1, 32, 8, 4096))  # type: ignore[arg-type]
    costs = Costs(on, Calibration(), attention="flash")
    peak = on.device.peak_flops_per_s["bf16"].value or 0.0
    of_matmul, of_attention = costs.kernels(program)
    assert 0.4 < 2 * 4096**3 / of_matmul / peak < 1.0
    assert 0.2 < program.flops[1] / of_attention / peak < 1.0
    lacks = [each.work for each, events in kernel_substitutes(costs, program) if len(events)]
    assert lacks, "each of these rests on another card's attention, or on none"
