"""Periods that are written down are those that are simulated, to the bit; planted faults are seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.simulator import fast_forward, host_clock, steps
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import World
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.simulator.program_builder import JOIN, MODULE, NODE, VIEW, ProgramBuilder
from spbench.bench.measure.simulator.simulation import Simulation
from tests.measure.simulator.step_programs import cluster, everyone, ring
from tests.measure.simulator.test_folding import assert_equal
from tests.measure.simulator.test_host_clock import with_host

#: ranks of the programs below, and of a node of the clusters
RANKS, NODE_OF = 6, 2
#: of random programs; those of the last two have hosts that come to wait for their devices late in a loop
SEEDS = [*range(40), 123, 181]


def body(random: Random) -> Callable[[ProgramBuilder, list[int], int], list[int]]:
    """A random period: kernels on two streams, work of the host, messages, some waited for a period later.
    It takes a builder, what is awaited of the period before, and the FLOPs that each kernel has beside its
    own."""
    flops = [random.choice([0, 0.1, 1, 3.7]) * random.random() for _ in range(3)]
    sent = [(random.choice([1, 2, 5]), random.random() * 3) for _ in range(random.choice([1, 1, 2]))]
    work = random.choice([0, VIEW, NODE + VIEW, 2 * MODULE, MODULE])
    copies, late, joins = random.random() < 0.4, random.random() < 0.4, random.random() < 0.15

    def write(b: ProgramBuilder, before: list[int], more: float) -> list[int]:
        posted = []
        for by, nbytes in sent:
            posted += [b.send(nbytes, (0, 0, 0, by)), b.recv(nbytes, (0, 0, 0, -by))]
        for each in flops:
            b.host_work += work
            b.kernel("mm", flops=each + more)
        if copies:
            point = b.record()
            b.on_stream(1)
            b.wait(point)
            b.kernel("copy", flops=flops[0])
            copied = b.record()
            b.on_stream(0)
            b.wait(copied)
        b.host_work += JOIN * joins
        for work_of in before if late else posted:
            b.wait(work_of)
        return posted if late else []

    return write


def program(random: Random) -> Program:
    """A gather beside two loops over random periods, of which one changes late, and something before, between
    and after them."""
    b = ProgramBuilder((1, 1, 1, RANKS))
    b.phase("forward")
    for _ in range(2):
        b.kernel("mm", flops=random.random())
        gather = b.collective("all_gather", random.random() * 20, everyone(RANKS))
        period, count = body(random), random.randrange(40, 90)
        changes = random.choice([count, random.randrange(count)])
        awaited: list[int] = []
        for number in range(count):
            awaited = period(b, awaited, 0.5 if number == changes else 0.0)
        for event in [*awaited, gather]:
            b.wait(event)
        b.host_work += random.choice([0, JOIN])
        b.kernel("mm", flops=random.random())
    return b.program()


def card(random: Random) -> Cluster:
    """A cluster bound by its links, its devices or its hosts, which are few launches ahead or many."""
    on = cluster(
        bandwidth=random.choice([0.3, 3.0, 100.0]),
        node_bandwidth=7.0,
        latency=random.choice([0.0, 0.01]),
        launch=random.choice([0.0, 0.003]),
        devices=NODE_OF,
    )
    loss = {"value": random.choice([0.0, 0.3]), "source": "made up"}
    known = on.model_dump(mode="json")
    on = Cluster.model_validate({**known, "device": {**known["device"], "overlap_loss": loss}})
    if random.random() < 0.25:
        return on
    scale = random.choice([0.001, 0.1, 1.0])
    seconds = {
        name: scale * random.random()
        for name in ("operator_s", "view_s", "node_s", "module_s", "collective_s", "launch_latency_s")
    }
    return with_host(on, **seconds, launches_ahead=random.choice([None, 3, 20, 100]))


def both(seed: int) -> Iterator[Simulation]:
    """The simulation of a random program that is fast-forwarded, and the one that is not."""
    random = Random(seed)
    world, on = World([program(random)], np.zeros(RANKS, dtype=np.int64), RANKS), card(random)
    for short in (True, False):
        yield Simulation(world, Costs(on, Calibration()), fast_forward=short)


def assert_same(short: Simulation, plain: Simulation) -> None:
    """All that a simulation records is the same."""
    found, expected = short.timeline(), plain.timeline()
    for name in ("reached", "left", "start", "end", "clocks"):
        assert np.array_equal(getattr(short, name)[0], getattr(plain, name)[0], equal_nan=True), name
    for host, stepped in zip(short.hosts, plain.hosts, strict=True):
        assert host is None or (stepped is not None and np.array_equal(host.now, stepped.now))
    assert short.posted == plain.posted
    assert short.ended == plain.ended
    assert (found.breakdown, found.parts) == (expected.breakdown, expected.parts)
    assert found.step_time_s == expected.step_time_s
    assert found.serial_s == expected.serial_s


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many periods each call has written down, in order."""
    counts: list[int] = []
    write = fast_forward.FastForward._write

    def counting(*arguments: Any) -> int:
        counts.append(write(*arguments))
        return counts[-1]

    monkeypatch.setattr(fast_forward.FastForward, "_write", counting)
    return counts


def assert_all_same() -> None:
    for seed in SEEDS:
        assert_same(*both(seed))


def test_random_programs_have_the_times_of_stepping(written: list[int]) -> None:
    assert_all_same()
    assert sum(written) > 60 * len(SEEDS)  # of 130 periods, some of which a change breaks off


def without_flops(columns: Callable[[Program], list[np.ndarray]]) -> Callable[[Program], list[np.ndarray]]:
    return lambda program: [column for column in columns(program) if column is not program.flops]


def a_period_short(write: Callable[..., int]) -> Callable[..., int]:
    """As ``write``, but for a period by which the clocks go on."""

    def writing(self: fast_forward.FastForward, *arguments: Any) -> int:
        count = write(self, *arguments)
        for clock in self._clocks if count else ():
            clock -= arguments[3]
        return count

    return writing


def unasked(written_on: Callable[..., int]) -> Callable[..., int]:
    """As ``written_on``, whatever it finds."""

    def noting(self: host_clock.HostClock, step: int, ran: Any, count: int, shift: float) -> int:
        written_on(self, step, ran, count, shift)
        return count

    return noting


def changes_of_none(numpy: Any) -> Any:
    """numpy, but that all arrays made of rows are 0."""
    return SimpleNamespace(**{**vars(numpy), "array": lambda rows: 0.0 * numpy.array(rows)})


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a period is left out": (fast_forward.FastForward, "_write", a_period_short),
    "a late change is overlooked": (steps, "_columns", without_flops),
    "all periods are taken for alike": (fast_forward, "np", changes_of_none),
    "a host is taken to wait as before": (host_clock.HostClock, "written_on", unasked),
    "what hosts wait for is not noted": (
        host_clock.HostClock,
        "written_on",
        lambda _: lambda self, step, ran, count, shift: count,
    ),
    "costs are not whole ticks": (Costs, "whole", lambda _: lambda self, seconds: seconds),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, change = FAULTS[fault]
    monkeypatch.setattr(where, name, change(getattr(where, name)))
    with pytest.raises(AssertionError):
        assert_all_same()


def test_a_ring_is_stepped_through_until_it_repeats(written: list[int]) -> None:
    size = 200
    world = World([ring(size, 1.5, 2, overlap=True)], np.zeros(size, dtype=np.int64), size)
    on = cluster(devices=8, bandwidth=3.0)
    simulation = Simulation(world, Costs(on, Calibration()))
    assert_same(simulation, Simulation(world, Costs(on, Calibration()), fast_forward=False))
    assert sum(written) > size - 20


def test_short_loops_and_several_programs_keep_their_costs() -> None:
    """What has no periods to be written down is not rounded to ticks either."""
    few = World([ring(steps.LEAST, 1.5, 2, overlap=True)], np.zeros(steps.LEAST, dtype=np.int64), 1)
    two = [dataclasses.replace(ring(80, 1.5, 2, overlap=True), names=names) for names in (("a",), ("b",))]
    for world in (few, World(two, np.arange(80) % 2, 80)):
        assert not any(world.periods)
        assert Simulation(world, Costs(cluster(), Calibration())).costs.tick_s == 0


def test_a_plain_trace_steps_through_all(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring around two nodes and more, with a host, folded and fast-forwarded, and neither."""
    cell = Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "strategy": "ring_attention",
            "sizes": {"sp": 48},
            "batch": 1,
            "seq_len": 480,
            "precision": "bf16",
            "cluster": "dgx-h100",
            "model_options": {"layers": 1, "hidden": 64, "heads": 2, "inner": 64},
        }
    )
    traces = virtual.trace_classes(cell, events=True)
    short = traces.simulator()()
    assert sum(written) > 48
    written.clear()
    assert_equal(short, dataclasses.replace(traces, fold=False).simulator()())
    assert not written
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    assert not virtual.trace_classes(cell, events=True).fold
