"""The simulated timeline against answers known beforehand. What holds of the timeline of any program.
Programs and clusters that cannot be timed: the error names the rank, the event or the rate.
Folded worlds have the times of whole ones, bit by bit; a shift that is no symmetry is refused."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.clusters.card_kernels import RatesUnknown, check_rates
from spbench.bench.measure.clusters.cluster import Calibration, cluster_names, load_cluster
from spbench.bench.measure.clusters.rates import Link
from spbench.bench.measure.simulator import simulate as simulation
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import Deadlock, owners
from spbench.bench.measure.simulator.program import Group, Mesh, Program, coordinates, offset, shifted
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.simulate import Simulator, smallest_shifts
from spbench.bench.measure.simulator.simulation import Simulation
from spbench.bench.measure.simulator.timeline import Timeline, trace_events
from spbench.impls.place import Place
from tests.grid import tabled
from tests.measure.simulator.step_programs import (
    INFINITE,
    chain,
    cluster,
    everyone,
    one_f_one_b,
    ring,
    serial_s,
    simulate,
    timed,
)


def test_a_group_is_translated_to_other_ranks() -> None:
    mesh = (2, 3, 1, 4)
    for ranks in ([0, 4, 8], [1, 2], list(range(24)), [3, 11], [12, 0]):
        group = Group.of(ranks, mesh)
        assert group.members(ranks[0], mesh) == tuple(ranks)
    assert Group.of([0, 4, 8], mesh).members(17, mesh) == (13, 17, 21)
    strided = Group.of([1, 3, 5], (6,))
    assert [strided.members(rank, (6,)) for rank in (3, 4)] == [(1, 3, 5), (0, 2, 4)]
    assert Group.of([0, 8], mesh).members(13, mesh) == (13, 21)  # first and last stage, of other peers


def test_a_group_along_folded_axes_is_translated_to_other_ranks() -> None:
    """Whether its ranks are a block of the mesh or not, every group of a kind is the same to its members."""
    for order in (("dp", "pp", "tp"), ("tp", "pp", "dp")):
        for dp, tp, folds in product((2, 3), (2, 6), ((2, 1), (3, 1), (4, 1), (2, 2))):
            sizes = {axis: {"dp": dp, "pp": 2, "tp": tp}[axis] for axis in order}
            sizes |= dict(zip(("ep", "etp"), folds, strict=True))
            if dp * tp % prod(folds):
                continue
            mesh = tuple(sizes[axis] for axis in order)
            for axes in (("ep",), ("etp",), ("edp",), ("ep", "etp")):
                places = [Place.of_rank(sizes, rank) for rank in range(prod(mesh))]
                if places[0].size(*axes) == 1:
                    continue
                (group,) = {Group.of(place.members(*axes), mesh, pipeline=1) for place in places}
                for rank, place in enumerate(places):
                    assert sorted(group.members(rank, mesh)) == place.members(*axes)


def test_a_peer_is_translated_to_other_ranks() -> None:
    mesh = (2, 3, 1, 4)
    assert coordinates(17, mesh) == (1, 1, 0, 1)
    assert shifted(7, offset(3, 0, mesh), mesh) == 4  # round the end of sp


@pytest.mark.parametrize(("flops", "nbytes", "seconds"), [(8, 4, 4.0), (8, 100, 10.0), (0, 5, 0.5)])
def test_a_kernel_costs_the_larger_of_compute_and_memory(flops: float, nbytes: float, seconds: float) -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("x", flops=flops, nbytes=nbytes)
    b.kernel("x", flops=flops, nbytes=nbytes)
    found = timed([b.program()], [[0]], cluster(rate=2, memory=10, launch=0.25))
    assert found.step_time_s == pytest.approx(2 * seconds + 0.5)
    assert found.breakdown["overhead_s"] == 0.5


def test_scalars_correct_what_they_name() -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.kernel("mm", flops=3, strided=4)
    b.kernel("add", nbytes=5)
    b.wait(b.collective("all_gather", 14, everyone(2)))
    simulator = Simulator([b.program()], [[0, 1]], cluster(memory=1))

    def at(calibration: Calibration) -> float:
        return simulator(calibration).step_time_s

    assert at(Calibration()) == 3 + 5 + 7
    assert at(Calibration(compute_efficiency=0.5)) == 6 + 5 + 7
    assert at(Calibration(memory_efficiency=0.5)) == 3 + 10 + 7
    assert at(Calibration(link_efficiency=0.5)) == 3 + 5 + 14
    assert at(Calibration(step_overhead_s=1, strided_element_s=2)) == 1 + 3 + 8 + 5 + 7


def test_more_than_three_scalars_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 3"):
        Calibration(compute_efficiency=0.5, memory_efficiency=0.5, link_efficiency=0.5, step_overhead_s=0.5)
    assert Calibration().label == "uncalibrated"
    assert Calibration(link_efficiency=0.9).label == "calibrated"


def test_a_ring_that_waits_at_once_hides_nothing() -> None:
    found = timed([ring(8, 3, 2, overlap=False)], [range(8)])
    assert found.step_time_s == 8 * 3 + 7 * 2
    assert found.breakdown["exposed_communication_s"] == 14
    assert found.breakdown["hidden_communication_s"] == 0


@pytest.mark.parametrize("compute", [1.0, 2.0, 5.0])
def test_a_ring_that_waits_later_hides_what_fits(compute: float) -> None:
    found = timed([ring(8, compute, 2, overlap=True)], [range(8)])
    assert found.step_time_s == 7 * max(compute, 2) + compute
    assert found.breakdown["exposed_communication_s"] == pytest.approx(7 * max(2 - compute, 0))
    assert found.breakdown["hidden_communication_s"] == pytest.approx(7 * min(2, compute))


@pytest.mark.parametrize(("second", "seconds"), [(1, 2 + 3), (2, 2 * 3)], ids=["one peer", "two peers"])
def test_sends_of_one_batch_share_the_link_once(second: int, seconds: float) -> None:
    """To one peer they go one after another; to two peers at half the speed each, until the longer ends."""
    b = ProgramBuilder((1, 1, 1, 3))
    works = [b.send(2, (0, 0, 0, 1)), b.send(3, (0, 0, 0, second))]
    works += [b.recv(2, (0, 0, 0, 2)), b.recv(3, (0, 0, 0, 3 - second))]
    for work in works:
        b.wait(work)
    assert timed([b.program()], [range(3)]).step_time_s == seconds


def test_an_async_collective_is_hidden_until_it_is_waited_for() -> None:
    for late in (False, True):
        b = ProgramBuilder((1, 1, 1, 2))
        work = b.collective("all_reduce", 4, everyone(2))
        if not late:
            b.wait(work)
        b.kernel("mm", flops=3)
        if late:
            b.wait(work)
        found = timed([b.program()], [[0, 1]])
        assert found.step_time_s == (4 if late else 7)
        assert found.breakdown["hidden_communication_s"] == (3 if late else 0)


def test_collectives_of_a_group_follow_each_other() -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    works = [b.collective("all_reduce", 4, everyone(2)) for _ in range(3)]
    b.wait(works[2])
    assert timed([b.program()], [[0, 1]]).step_time_s == 12


def test_a_collective_starts_when_its_last_member_arrives() -> None:
    programs = []
    for flops in (1, 5):
        b = ProgramBuilder((1, 2, 1, 2))
        b.kernel("mm", flops=flops)
        b.wait(b.collective("all_reduce", 6, Group((1,), ((0,), (1,)))))
        programs.append(b.program())
    found = timed(programs, [[0, 1], [2, 3]])
    assert found.step_time_s == 5 + 6
    assert found.breakdown_of(0)["bubble_s"] == 4
    assert found.breakdown_of(2)["bubble_s"] == 0
    assert found.breakdown_of(0)["exposed_communication_s"] == 6


@pytest.mark.parametrize("size", [3, 8, 64])
def test_a_chain_runs_one_rank_after_the_other(size: int) -> None:
    found = timed(*chain(size, 3, 2))
    assert found.step_time_s == size * 3 + (size - 1) * 2
    assert found.breakdown_of(0)["bubble_s"] == (size - 1) * 3 + (size - 2) * 2
    assert found.breakdown_of(size - 1)["exposed_communication_s"] == 2


def test_ranks_that_a_chain_has_parted_go_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the send of each is simulated once for all, not rank by rank."""
    size, gathered = 40, list[int]()
    programs = []
    for first, last in ((True, False), (False, False), (False, True)):
        b = ProgramBuilder((1, 1, 1, size))
        if not first:
            b.wait(b.recv(1, (0, 0, 0, -1)))
        b.kernel("scan", flops=2)
        if not last:
            b.send(1, (0, 0, 0, 1))
        b.kernel("mm", flops=3)
        b.wait(b.collective("all_gather", 0, everyone(size)))
        programs.append(b.program())
    posted = Simulation._gather

    def gather(self: Simulation, number: int, step: int, who: np.ndarray) -> None:
        gathered.append(len(who))
        posted(self, number, step, who)

    monkeypatch.setattr(Simulation, "_gather", gather)
    found = timed(programs, [[0], list(range(1, size - 1)), [size - 1]])
    assert sum(gathered) == size
    assert len(gathered) < 5
    assert found.step_time_s == 2 * size + (size - 1) + 3


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 8), (8, 8), (8, 3)])
def test_bubble_of_1f1b(stages: int, micro_batches: int) -> None:
    found = timed(*one_f_one_b(stages, micro_batches, 1.0, 2.0), INFINITE)
    assert found.step_time_s == pytest.approx((micro_batches + stages - 1) * 3)
    bubble = found.breakdown["bubble_s"] / found.step_time_s
    assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_costs_of_collectives_on_one_level() -> None:
    costs = Costs(cluster(bandwidth=2.0, latency=0.5), Calibration())
    ranks = [range(4)]
    assert costs.collectives("all_reduce", 8, ranks) == [6 * (0.5 + 1)]
    assert costs.collectives("all_gather", 8, ranks) == [3 * (0.5 + 1)]
    assert costs.collectives("reduce_scatter", 8, ranks) == [3 * (0.5 + 1)]
    assert costs.collectives("all_to_all", 8, ranks) == [3 * (0.5 + 1)]
    assert costs.collectives("broadcast", 8, ranks) == [3 * 0.5 + 4]
    assert costs.collectives("barrier", 0, ranks) == [3.0]
    with pytest.raises(NotImplementedError, match="scatter_gather"):
        costs.collectives("scatter_gather", 8, ranks)


def test_groups_share_the_cards_of_a_node() -> None:
    # 2 nodes of 4 devices; a node's link moves 100 bytes a second, a card 2
    def all_gather(nics: int, groups: list[list[int]]) -> float:
        costs = Costs(cluster(bandwidth=2.0, devices=4, nics=nics, node_bandwidth=100.0), Calibration())
        return costs.collectives("all_gather", 8, groups)[0]

    inside, whole, across = [[0, 1, 2, 3]], [list(range(8))], [[i, i + 4] for i in range(4)]
    assert all_gather(4, inside) == pytest.approx(6 / 100)
    assert all_gather(4, whole) == pytest.approx(7 / 8)  # one ring a card: 8 bytes a second
    assert all_gather(1, whole) == pytest.approx(7 / 2)
    assert all_gather(4, across) == pytest.approx(4 / 2)  # a card each
    assert all_gather(1, across) == pytest.approx(4 / 0.5)  # one card for four


def test_transfers_share_the_cards_of_a_node() -> None:
    costs = Costs(cluster(bandwidth=2.0, latency=0.5, devices=2, nics=1, node_bandwidth=100.0), Calibration())
    latency, per_byte = costs.transfers([0, 1, 2, 3], [1, 2, 3, 0], 1)
    assert latency.tolist() == [0.0, 0.5, 0.0, 0.5]
    assert per_byte.tolist() == [0.01, 0.5, 0.01, 0.5]
    assert costs.transfers([0, 1], [2, 3], 1)[1].tolist() == [1.0, 1.0]
    assert costs.transfers([0, 1], [2, 3], 2)[1].tolist() == [2.0, 2.0]  # two sends at once each


def test_every_profile_times_what_it_should() -> None:
    for name in set(cluster_names()) - {"local"}:
        profile = load_cluster(name)
        b = ProgramBuilder((1, 1, 1, 16))
        b.kernel("mm", flops=1e12, precision="fp16")
        b.wait(b.collective("all_reduce", 1e9, everyone(16)))
        found = simulate([b.program()], [range(16)], profile, "fp16")
        assert found.step_time_s > 0
        for link in (profile.network, profile.node_link):
            assert isinstance(link, Link) or profile.devices_per_node == 1


def test_the_order_of_programs_and_ranks_does_not_matter() -> None:
    programs, ranks = one_f_one_b(4, 6, 1.0, 2.0, nbytes=0.5, width=2)
    forwards = timed(programs, ranks)
    backwards = timed(programs[::-1], [r[::-1] for r in ranks[::-1]])
    assert forwards.step_time_s == backwards.step_time_s
    for rank in range(8):
        assert forwards.breakdown_of(rank) == pytest.approx(backwards.breakdown_of(rank))


def test_a_collective_of_several_programs_waits_for_the_slowest_rank_of_each() -> None:
    """A chain whose last link comes after the collective, so that of the middle ranks one is the slowest."""
    programs = []
    for first, last in ((True, False), (False, False), (False, True)):
        b = ProgramBuilder((1, 1, 1, 5))
        if not first and not last:
            b.wait(b.recv(1, (0, 0, 0, -1)))
        if not last:
            b.kernel("scan", flops=1)
            b.send(1, (0, 0, 0, 1))
        b.wait(b.collective("all_reduce", 1, everyone(5)))
        if last:
            b.wait(b.recv(1, (0, 0, 0, -1)))
        b.kernel("scan", flops=3 if first else 1)
        programs.append(b.program())
    found = timed(programs, [[0], [1, 2, 3], [4]], INFINITE)
    assert found.step_time_s == 7
    assert found.by_rank["compute"].tolist() == [4, 2, 2, 2, 1]
    waited = found.by_rank["bubble"] + found.by_rank["exposed_communication"]
    assert waited == pytest.approx([3, 5, 5, 5, 6])


def test_large_worlds_are_quick() -> None:
    """Loose bounds: seconds, not minutes; the point is that ranks go together."""
    start = time.process_time()
    b = ProgramBuilder((1, 1, 1, 64))
    for _ in range(6000):
        for work in (b.send(1, (0, 0, 0, 1)), b.recv(1, (0, 0, 0, -1))):
            b.wait(work)
    assert timed([b.program()], [range(64)]).step_time_s == 6000
    timed(*one_f_one_b(8, 8, 1.0, 2.0, nbytes=1.0, width=8))
    assert time.process_time() - start < 15


def test_a_profile_brings_its_own_calibration() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=1)
    fitted = Calibration(compute_efficiency=0.25, fitted_on=["a cell"])
    profile = cluster().model_copy(update={"calibration": {"fp32": fitted}})
    assert simulate([b.program()], [[0]], profile).step_time_s == 4
    assert simulate([b.program()], [[0]], profile, calibration=Calibration()).step_time_s == 1


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Program], list[list[int]]]:
    """Two pipeline stages of two ranks that compute, shift round, reduce, and pass on, some of it async."""
    script = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["kernel", "shift", "reduce", "tie", "down", "up"]),
                st.integers(0, 5),
                st.booleans(),
            ),
            max_size=12,
        )
    )
    extra = draw(st.integers(0, 4))
    programs = []
    for stage in (0, 1):
        b = ProgramBuilder((1, 2, 1, 2))
        later: list[int] = []
        b.kernel("mm", flops=extra * stage)
        for what, amount, asynchronous in script:
            posted: list[int] = []
            if what == "kernel":
                b.kernel("mm", flops=amount, nbytes=amount)
            elif what == "shift":
                posted = [b.send(amount, (0, 0, 0, 1)), b.recv(amount, (0, 0, 0, 1))]
            elif what == "reduce":
                posted = [b.collective("all_reduce", amount, everyone(2))]
            elif what == "tie":
                posted = [b.collective("all_gather", amount, Group((1,), ((0,), (1,))))]
            elif (what == "down") == (stage == 0):
                posted = [b.send(amount, (0, 1, 0, 0))]
            else:
                posted = [b.recv(amount, (0, 1, 0, 0))]
            if asynchronous:
                later += posted
            else:
                for work in posted:
                    b.wait(work)
        for work in later:
            b.wait(work)
        programs.append(b.program())
    return programs, [[0, 1], [2, 3]]


@given(worlds(), st.floats(0.1, 10), st.floats(1.0, 10))
@settings(max_examples=60, deadline=None)
def test_invariants(world: tuple[list[Program], list[list[int]]], bandwidth: float, faster: float) -> None:
    slow = timed(*world, cluster(bandwidth=bandwidth, latency=0.1))
    floor = max(p.flops.sum() for p in world[0])
    assert floor - 1e-9 <= slow.step_time_s <= serial_s(slow) + 1e-9
    for rank in range(4):
        parts = slow.breakdown_of(rank)
        assert min(parts.values()) >= -1e-9
        hidden = parts.pop("hidden_communication_s")
        assert sum(parts.values()) == pytest.approx(slow.step_time_s)
        assert hidden <= slow.step_time_s + 1e-9
    fast = timed(*world, cluster(bandwidth=bandwidth * faster, latency=0.1))
    assert fast.step_time_s <= slow.step_time_s + 1e-9
    assert timed(*world, cluster(bandwidth=bandwidth)).step_time_s <= slow.step_time_s + 1e-9


@given(worlds())
@settings(max_examples=50, deadline=None)
def test_zero_cost_links_leave_only_computing_and_waiting_for_it(
    world: tuple[list[Program], list[list[int]]],
) -> None:
    found = timed(*world, INFINITE)
    assert found.breakdown["exposed_communication_s"] < 1e-200
    assert found.breakdown["hidden_communication_s"] < 1e-200
    alone = timed([ring(4, 3, 2, overlap=False)], [range(4)], INFINITE)
    assert alone.step_time_s == alone.breakdown["compute_s"] == 12


@pytest.mark.parametrize(
    ("phase", "halves", "named"),
    [
        ("forward", "r", r"rank 0, event 0 \(recv of 8 bytes from rank 1, forward\).*no matching"),
        ("forward", "srr", r"recv of 8 bytes from rank 1, forward\).*no matching send"),
        ("backward", "rs", r"rank 0, event 0 \(recv of 8 bytes from rank 1, backward\).*never ends"),
    ],
    ids=["nothing is sent", "received twice", "both wait for each other"],
)
def test_a_message_that_never_ends_is_named(phase: str, halves: str, named: str) -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.phase(phase)
    for half in halves:
        b.wait((b.recv if half == "r" else b.send)(8, (0, 0, 0, 1)))
    with pytest.raises(Deadlock, match=named):
        timed([b.program()], [[0, 1]])


def test_a_collective_that_a_member_never_posts_is_named() -> None:
    one, other = ProgramBuilder((1, 2, 1, 1)), ProgramBuilder((1, 2, 1, 1))
    one.collective("all_reduce", 8, Group((1,), ((0,), (1,))))
    with pytest.raises(Deadlock, match=r"rank 0, event 0 \(all_reduce of 8 bytes over ranks \[0, 1\]"):
        timed([one.program(), other.program()], [[0], [1]])


def test_two_halves_must_agree_about_the_bytes() -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.send(8, (0, 0, 0, 1))
    b.recv(9, (0, 0, 0, 1))
    with pytest.raises(ValueError, match="different bytes"):
        timed([b.program()], [[0, 1]])


def test_unknown_rates_are_named() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=1)
    with pytest.raises(RatesUnknown, match="bf16"):
        simulate([b.program()], [[0]], cluster(), "bf16")
    with pytest.raises(RatesUnknown, match="local"):
        simulate([b.program()], [[0]], load_cluster("local"))


@pytest.mark.parametrize(("unknown", "world"), [("network", 5), ("node_link", 2)])
def test_a_link_must_be_known_only_where_ranks_use_it(unknown: str, world: int) -> None:
    known = cluster(devices=4)
    link = getattr(known, unknown)
    unknown_latency = link.latency_s.model_copy(update={"value": None})
    lacking = known.model_copy(update={unknown: link.model_copy(update={"latency_s": unknown_latency})})
    check_rates(lacking, "fp32", world - 1)
    with pytest.raises(RatesUnknown, match="latency or bandwidth"):
        check_rates(lacking, "fp32", world)


def assert_equal(folded: Timeline, whole: Timeline) -> None:
    """Every time, and every event of every rank, is the same."""
    assert folded.step_time_s == whole.step_time_s
    assert folded.breakdown == whole.breakdown
    for name, values in whole.by_rank.items():
        assert np.array_equal(folded.by_rank[name], values), name
    ranks = range(whole.world_size)
    assert list(trace_events(folded, ranks)) == list(trace_events(whole, ranks))
    assert serial_s(folded) == pytest.approx(serial_s(whole))


def times(
    programs: Sequence[Program], ranks_of: Sequence[Sequence[int]], nodes_of: int, shifts: Mesh = ()
) -> Timeline:
    """The timeline of a world on nodes of that many ranks, between which it is slow; whole, or folded by
    shifts whatever they do to it."""
    program_of = owners(programs, ranks_of)
    on = cluster(bandwidth=0.1, devices=nodes_of)
    world = simulation.World(programs, program_of, shifts or programs[0].mesh)
    return simulation.Simulation(world, simulation.Costs(on, Calibration())).timeline()


def shifts_of(programs: Sequence[Program], ranks_of: Sequence[Sequence[int]], nodes_of: int) -> Mesh:
    return smallest_shifts(programs, owners(programs, ranks_of), cluster(devices=nodes_of))


def test_nodes_that_break_are_refused() -> None:
    """The last node of 20 ranks on nodes of 8 has half as many as the others; a shift by 4 breaks them."""
    world = [ring(20, 1, 1, overlap=False)], [range(20)]
    assert shifts_of(*world, 8) == (1, 1, 1, 20)
    assert times(*world, 8, (1, 1, 1, 4)).step_time_s < times(*world, 8).step_time_s
    assert shifts_of(*world, 4) == (1, 1, 1, 4)
    assert_equal(times(*world, 4, (1, 1, 1, 4)), times(*world, 4))


@pytest.mark.parametrize("outer", [True, False])
def test_replicas_and_ranks_of_a_stage_are_folded(outer: bool) -> None:
    """Pipeline stages stay apart, whether replicas of it are around its stages or within them."""
    programs, ranks = one_f_one_b(4, 3, 1.0, 2.0, nbytes=0.5, width=2)
    assert shifts_of(programs, ranks, 2) == (1, 4, 1, 1)
    mesh = (3, 4, 1, 2) if outer else (1, 4, 3, 2)
    replicas = [dataclasses.replace(p, mesh=mesh) for p in programs]
    stages = np.unravel_index(np.arange(24), mesh)[1]
    ranks_of = [np.flatnonzero(stages == stage).tolist() for stage in range(4)]
    assert shifts_of(replicas, ranks_of, 2) == (1, 4, 1, 1)
    assert_equal(times(replicas, ranks_of, 2, (1, 4, 1, 1)), times(replicas, ranks_of, 2))


def test_ranks_that_are_simulated_need_not_be_the_first() -> None:
    """A ring of three pairs on nodes of four ranks: those of a pair do the same, pairs do not."""
    b = ProgramBuilder((3, 1, 1, 2))
    b.phase("forward")
    for _ in range(3):
        b.send(2, (1, 0, 0, 0))
        b.wait(b.recv(2, (-1, 0, 0, 0)))
        b.kernel("mm", flops=1)
        b.wait(b.collective("all_reduce", 1, Group((3,), ((0,), (1,)))))
    world = [b.program()], [range(6)], 4
    assert shifts_of(*world) == (3, 1, 1, 1)
    assert_equal(times(*world, (3, 1, 1, 1)), times(*world))


def posts_of(mesh: tuple[int, ...], compute: float, post: Callable[[ProgramBuilder], list[int]]) -> Program:
    """A program that computes, communicates and waits."""
    b = ProgramBuilder(mesh)
    b.phase("forward")
    b.kernel("mm", flops=compute)
    for work in post(b):
        b.wait(work)
    return b.program()


def sends_round(b: ProgramBuilder) -> list[int]:
    return [b.send(1, (0, 0, 0, 1)), b.recv(1, (0, 0, 0, -1))]


def sums_up_in_pairs(b: ProgramBuilder) -> list[int]:
    return [b.collective("all_reduce", 1, Group((3,), ((0,), (1,)), (2,)))]


def test_groups_that_are_not_mapped_are_refused() -> None:
    """Groups of two ranks: a shift by three keeps programs, and maps ranks 0 and 1 onto 3 and 4, which are of
    two groups."""
    heavy = [0, 3, 6, 9]
    programs = [posts_of((1, 1, 1, 12), compute, sums_up_in_pairs) for compute in (5, 1)]
    world = programs, [heavy, [r for r in range(12) if r not in heavy]], 1
    assert shifts_of(*world) == (1, 1, 1, 6)
    assert_equal(times(*world, (1, 1, 1, 6)), times(*world))
    forced, whole = (list(times(*world, p).events(4)) for p in ((1, 1, 1, 3), ()))
    assert forced != whole  # two that compute little wait for none that computes more


def test_one_simulated_rank_adds_up_as_many_do() -> None:
    """Sums of floats depend on their order; that of a rank's waits is the same however many are simulated."""
    b = ProgramBuilder((1, 1, 1, 4))
    b.phase("forward")
    for i in range(1000):
        nbytes = i * 37 % 101 / 7 + 0.001
        works = [b.send(nbytes, (0, 0, 0, 1)), b.recv(nbytes, (0, 0, 0, -1))]
        b.kernel("mm", flops=nbytes / 7)
        for work in works:
            b.wait(work)
    world = [b.program()], [range(4)]
    assert shifts_of(*world, 4) == (1, 1, 1, 1)
    assert_equal(times(*world, 4, (1, 1, 1, 1)), times(*world, 4))


def test_programs_that_are_not_mapped_are_refused() -> None:
    programs = [posts_of((1, 1, 1, 4), compute, sends_round) for compute in (5, 1)]
    assert shifts_of(programs, [[0, 2], [1, 3]], 4) == (1, 1, 1, 2)
    assert shifts_of(programs, [[0, 1], [2, 3]], 4) == (1, 1, 1, 4)


def test_groups_of_chosen_members_are_kept() -> None:
    """The first and last stage sum up, as for a tied embedding; the stages between take no part."""

    def ties(b: ProgramBuilder) -> list[int]:
        return [b.collective("all_reduce", 1, Group((1,), ((0,), (2,))))]

    mesh = (4, 3, 1, 1)
    programs = [posts_of(mesh, 2, ties), posts_of(mesh, 9, lambda _: []), posts_of(mesh, 1, ties)]
    ranks_of = [list(range(stage, 12, 3)) for stage in range(3)]
    assert shifts_of(programs, ranks_of, 3) == (1, 3, 1, 1)
    assert_equal(times(programs, ranks_of, 3, (1, 3, 1, 1)), times(programs, ranks_of, 3))


@tabled(__file__, "the_group_of_another_rank")
def test_the_group_of_another_rank(ranks: list[int], of_last: list[int]) -> None:
    """The whole axis, a run of consecutive ranks of it, and runs across another axis."""
    mesh = (2, 1, 6, 1)
    group = Group.of(ranks, mesh)
    assert list(group.members(ranks[0], mesh)) == ranks
    assert list(group.members(11, mesh)) == of_last
