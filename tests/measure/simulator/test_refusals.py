"""Programs and clusters that cannot be timed: the error names the rank, the event or the rate."""

from __future__ import annotations

import pytest

from spbench.bench.measure.clusters.carried_rates import RatesUnknown, check_rates
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.simulator.message_matching import Deadlock
from spbench.bench.measure.simulator.program import Group
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from tests.measure.simulator.step_programs import cluster, simulate, timed


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
