"""What holds of the timeline of any program. Programs and clusters that cannot be timed: the error names the
rank, the event or the rate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.simulator.message_matching import Deadlock
from spbench.bench.measure.simulator.needed_rates import RatesUnknown, check_rates
from spbench.bench.measure.simulator.program import Group, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from tests.measure.simulator.step_programs import INFINITE, cluster, everyone, ring, simulate, timed


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
    assert floor - 1e-9 <= slow.step_time_s <= slow.serial_s + 1e-9
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
