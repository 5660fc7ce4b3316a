"""Folded worlds have the times of whole ones, bit by bit; a shift that is no symmetry is refused."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from spbench.bench.measure.clusters.cluster import Calibration
from spbench.bench.measure.simulator import message_matching
from spbench.bench.measure.simulator import simulate as simulation
from spbench.bench.measure.simulator.message_matching import owners
from spbench.bench.measure.simulator.program import Group, Mesh, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.simulate import smallest_shifts
from spbench.bench.measure.simulator.timeline import Timeline, trace_events
from tests.measure.simulator.step_programs import cluster, one_f_one_b, ring


def assert_equal(folded: Timeline, whole: Timeline) -> None:
    """Every time, and every event of every rank, is the same."""
    assert folded.step_time_s == whole.step_time_s
    assert folded.breakdown == whole.breakdown
    for name, values in whole.by_rank.items():
        assert np.array_equal(folded.by_rank[name], values), name
    ranks = range(whole.world_size)
    assert list(trace_events(folded, ranks)) == list(trace_events(whole, ranks))
    assert folded.serial_s == pytest.approx(whole.serial_s)


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


def ring_of_pipelines() -> tuple[list[Program], list[list[int]]]:
    """Two stages of six ranks, in each a ring whose ranks differ by their links."""
    programs = []
    for stage in range(2):
        b = ProgramBuilder((1, 2, 1, 6))
        b.phase("forward")
        for i in range(5):
            works = [b.recv(2, (0, 0, 0, -1)), b.send(2, (0, 0, 0, 1))]
            b.kernel("mm", flops=1 + i % 3)
            works.append(b.recv(3, (0, -1, 0, 0)) if stage else b.send(3, (0, 1, 0, 0)))
            for work in works:
                b.wait(work)
        programs.append(b.program())
    return programs, [list(range(6)), list(range(6, 12))]


@pytest.mark.parametrize(
    "world", [ring_of_pipelines(), ([ring(6, 1, 1, overlap=True)], [range(6)])], ids=["two stages", "one"]
)
def test_transfers_of_all_ranks_at_once_are_those_of_some(
    world: tuple[list[Program], list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that go together take a shorter way through the simulation, to the same times."""
    together = times(*world, 4)
    matched = message_matching.Meeting
    monkeypatch.setattr(
        message_matching, "Meeting", lambda *found: dataclasses.replace(matched(*found), everyone=False)
    )
    monkeypatch.delattr(simulation.Simulation, "_transfer_all")
    assert_equal(times(*world, 4), together)
    assert len(set(together.by_rank["exposed_communication"])) > 1


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


@pytest.mark.parametrize(
    ("ranks", "of_last"),
    [
        ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]),
        ([2, 3], [10, 11]),
        ([0, 1, 2], [9, 10, 11]),
        ([0, 6], [5, 11]),
        ([0, 1, 6, 7], [4, 5, 10, 11]),
        ([1, 2], [7, 8]),  # of a mesh of 6 no run of two: all ranks have the one group
    ],
)
def test_the_group_of_another_rank(ranks: list[int], of_last: list[int]) -> None:
    """The whole axis, a run of consecutive ranks of it, and runs across another axis."""
    mesh = (2, 1, 6, 1)
    group = Group.of(ranks, mesh)
    assert list(group.members(ranks[0], mesh)) == ranks
    assert list(group.members(11, mesh)) == of_last
