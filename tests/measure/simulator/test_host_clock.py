"""The host's clock: closed answers of small programs, and any program beside a loop over its events."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.clusters.rates import Host
from spbench.bench.measure.simulator import host_clock
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import (
    COLLECTIVE,
    COMPUTE_STREAM,
    HOST_READ,
    KERNEL,
    RECORD,
    WAIT,
    Program,
)
from spbench.bench.measure.simulator.program_builder import JOIN, MODULE, NODE, VIEW, ProgramBuilder
from tests.measure.simulator.step_programs import chain, cluster, everyone, one_f_one_b, ring, timed

FIGURES = {
    "operator_s": 2.0,
    "view_s": 0.5,
    "node_s": 1.0,
    "module_s": 3.0,
    "collective_s": 4.0,
    "step_s": 0.25,
    "launch_latency_s": 0.5,
}


def host(**figures: Any) -> Host:
    """One whose every figure is 0, but for those that are given."""
    values = {**dict.fromkeys(FIGURES, 0.0), "launches_ahead": None, **figures}
    return Host.model_validate(
        {name: {"value": value, "source": "made up"} for name, value in values.items()}
    )


def with_host(on: Cluster | None = None, **figures: Any) -> Cluster:
    return (on or cluster()).model_copy(update={"host": host(**figures)})


def kernels(*flops: float) -> ProgramBuilder:
    """A rank's kernels, of as many seconds as FLOPs."""
    b = ProgramBuilder((1, 1, 1, 1))
    b.phase("forward")
    for each in flops:
        b.kernel("mm", flops=each)
    return b


def test_what_the_host_reads_costs_a_view_a_launch_and_a_wait_for_each_element() -> None:
    """Three numbers of eight bytes, after a kernel of 10 s that the host waits for, and before one of 1 s."""
    b = kernels(10.0)
    b.kernel("samples_begun", nbytes=24, category=HOST_READ)
    b.kernel("mm", flops=1.0)
    on = with_host(view_s=0.5, operator_s=2.0, launch_latency_s=0.25)
    launched = 0.25 + 2.0
    read = 3 * (0.5 + 2.0 + 0.25)
    assert timed([b.program()], [[0]], on).step_time_s == launched + 10 + launched + read + launched + 1
    assert timed([b.program()], [[0]], cluster()).step_time_s == 11


def test_a_step_takes_the_longer_of_what_its_host_and_its_device_take() -> None:
    """Kernels of 1 s, launched every 2 s: the last starts after 10 s and the latency. Of 3 s: they follow
    each other after the first launch."""
    on = with_host(operator_s=2.0, launch_latency_s=0.5)
    bound = timed([kernels(*[1.0] * 5).program()], [[0]], on)
    assert bound.step_time_s == 11.5
    assert bound.breakdown["host_s"] == 11.5 - 5
    hidden = timed([kernels(*[3.0] * 5).program()], [[0]], on)
    assert hidden.step_time_s == 2.5 + 15
    assert hidden.breakdown["host_s"] == 2.5


def test_each_kind_of_work_takes_its_time_on_the_host() -> None:
    b = kernels(0.0)
    b.host_work += 2 * VIEW + 3 * NODE + MODULE
    b.kernel("mm", flops=0)
    found = timed([b.program()], [[0]], with_host(**FIGURES))
    assert found.step_time_s == 0.25 + 2 + (1 + 3 + 3) + 2 + 0.5
    slower = timed([b.program()], [[0]], with_host(**FIGURES, scale=2.0))
    assert slower.step_time_s == 2 * found.step_time_s


def test_a_value_that_is_read_joins_the_clocks() -> None:
    """10 s of computing hide the launch of what follows, unless the host waits for them before it."""
    steps = []
    for joins in (False, True):
        b = kernels(10.0)
        b.host_work += joins * JOIN
        b.kernel("mm", flops=1)
        b.kernel("mm", flops=1)
        steps.append(timed([b.program()], [[0]], with_host(operator_s=2.0)).step_time_s)
    assert steps == [2 + 12, 2 + 10 + 2 + 2 + 1]


def test_on_a_cpu_both_clocks_are_one() -> None:
    """Two kernels of 3 s, launched in 2 s each, and a sum of 3 s between them, waited for at once."""
    b = ProgramBuilder((1, 1, 1, 2))
    b.kernel("mm", flops=3)
    b.wait(b.collective("all_reduce", 3, everyone(2)))
    b.kernel("mm", flops=3)
    on = with_host(operator_s=2.0)
    alone = timed([b.program()], [[0, 1]], on).step_time_s
    one = timed(
        [b.program()],
        [[0, 1]],
        on.model_copy(update={"host": on.host.model_copy(update={"synchronous": True})}),
    )
    assert (alone, one.step_time_s) == (2 + 3 + 3 + 3, 2 + 3 + 3 + 2 + 3)
    assert one.breakdown["host_s"] == 4


def test_what_is_posted_late_is_the_hosts_fault() -> None:
    """The stream waits at once for a collective that its host posts after 4 s, of 3 s."""
    b = ProgramBuilder((1, 1, 1, 2))
    b.wait(b.collective("all_gather", 6, everyone(2)))
    found = timed([b.program()], [[0, 1]], with_host(collective_s=4.0)).breakdown
    assert (found["host_s"], found["exposed_communication_s"], found["bubble_s"]) == (4, 3, 0)


def test_the_host_is_so_many_launches_ahead_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 kernels of 1 s that are launched in no time, then one whose launch takes 8 s."""
    monkeypatch.setattr(host_clock, "PIECE", 1)
    b = kernels(*[1.0] * 40)
    b.host_work += MODULE
    b.kernel("mm", flops=1)
    for ahead, end in ((None, 41), (10, 41), (8, 41), (5, 44), (1, 48)):
        found = timed([b.program()], [[0]], with_host(module_s=8.0, launches_ahead=ahead))
        assert found.step_time_s == end, ahead


def test_in_pieces_the_queue_is_longer_by_a_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    b = kernels(*[1.0] * 600)
    b.host_work += MODULE
    b.kernel("mm", flops=1)
    program = b.program()

    def step(ahead: int) -> float:
        on = with_host(module_s=300.0, launches_ahead=ahead)
        return timed([program], [[0]], on).step_time_s

    in_pieces = step(200)
    monkeypatch.setattr(host_clock, "PIECE", 1)
    assert step(200 + 128) <= in_pieces <= step(200)
    assert step(200) == 400 + 300 + 1


@pytest.mark.parametrize("figure", [name for name in FIGURES if name not in ("node_s", "module_s", "view_s")])
def test_no_figure_can_grow_and_a_step_be_shorter(figure: str) -> None:
    for programs, ranks in (
        chain(4, 2, 1),
        one_f_one_b(3, 4, 1, 2, 1.0),
        ([ring(4, 1, 2, overlap=True)], [range(4)]),
    ):
        steps = [timed(programs, ranks).step_time_s]
        for value in (0.0, 0.1, 1.0, 5.0):
            steps.append(timed(programs, ranks, with_host(**{figure: value})).step_time_s)
        assert steps[0] == pytest.approx(steps[1], rel=1e-12)
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Two ranks do this: kernels and collectives on two streams, waits, records, and work of the host."""
    b = ProgramBuilder((1, 1, 1, 2))
    b.phase("forward")
    events: list[int] = []
    for what in draw(
        st.lists(st.sampled_from(["kernel", "kernel", "collective", "wait", "record"]), max_size=25)
    ):
        b.on_stream(draw(st.sampled_from([0, 0, 1])))
        b.host_work += draw(st.sampled_from([0, VIEW, NODE, 2 * MODULE, JOIN, JOIN + VIEW]))
        if what == "kernel":
            b.kernel("mm", flops=draw(st.integers(0, 6)))
        elif what == "collective":
            events.append(b.collective("all_reduce", draw(st.integers(0, 6)), everyone(2)))
        elif what == "record":
            events.append(b.record())
        elif events:
            b.wait(draw(st.sampled_from(events)))
    return b.program()


def event_by_event(program: Program, on: Cluster) -> tuple[list[float], float]:
    """When each event starts (a wait: is left), and when all have ended."""
    costs, hosts = Costs(on, Calibration()), on.host
    figures = [hosts.seconds(name) for name in ("view_s", "node_s", "module_s")]
    kernel_s = costs.kernels(program)
    latency, ahead = hosts.seconds("launch_latency_s"), hosts.launches_ahead.value or 10**9
    clocks, ends, starts = defaultdict(float), dict[int, float](), list[float]()
    done: list[tuple[int, float]] = []
    now, free, launched = hosts.seconds("step_s"), 0.0, 0
    for event, kind in enumerate(program.kind.tolist()):
        stream, partner = int(program.stream[event]), int(program.partner[event])
        *counts, joins = program.host[event].tolist()
        if joins:
            now = max(now, clocks[COMPUTE_STREAM])
        now += sum(n * s for n, s in zip(counts, figures, strict=True))
        now += (
            hosts.seconds({KERNEL: "operator_s", COLLECTIVE: "collective_s"}[kind])
            if kind in (KERNEL, COLLECTIVE)
            else 0
        )
        if kind == KERNEL and stream == COMPUTE_STREAM:
            launched += 1
            starts.append(max(clocks[stream], now + latency))
            clocks[stream] = starts[-1] + kernel_s[event] + costs.launch_s
        done.append((launched, clocks[COMPUTE_STREAM]))
        now = max(now, *[clock for count, clock in done if count <= launched - ahead][-1:], 0.0)
        if kind == KERNEL and stream != COMPUTE_STREAM:
            starts.append(max(clocks[stream], now + latency))
            clocks[stream] = ends[event] = starts[-1] + kernel_s[event] + costs.launch_s
        elif kind == COLLECTIVE:
            starts.append(max(clocks[stream], now + latency, free))
            free = ends[event] = (
                starts[-1] + costs.collectives("all_reduce", float(program.nbytes[event]), [[0, 1]])[0]
            )
        elif kind == WAIT:
            clocks[stream] = max(clocks[stream], ends[partner])
            starts.append(clocks[stream])
        elif kind == RECORD:
            ends[event] = clocks[stream]
            starts.append(clocks[stream])
    return starts, max([now, *clocks.values(), *ends.values()], default=0.0)


@given(programs(), st.sampled_from([None, 1, 3, 8]), st.sampled_from([0.0, 0.25]))
@settings(max_examples=150, deadline=None)
def test_any_program_as_a_loop_over_its_events_has_it(
    program: Program, ahead: int | None, launch: float
) -> None:
    on = with_host(cluster(launch=launch), **FIGURES, launches_ahead=ahead)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_clock, "PIECE", 1)
        found = timed([program], [[0, 1]], on)
    starts, end = event_by_event(program, on)
    assert found.step_time_s == pytest.approx(end, rel=1e-12)
    loud = [i for i, kind in enumerate(program.kind) if kind in (KERNEL, COLLECTIVE)]
    seen = [e.start_s for e in found.events(1) if not e.name.startswith("wait for")]
    assert seen == pytest.approx([starts[i] for i in loud], rel=1e-12)
    parts = found.breakdown_of(0)
    assert min(parts.values()) >= -1e-9
    assert sum(s for name, s in parts.items() if name != "hidden_communication_s") == pytest.approx(end)
    assert end <= found.serial_s + 1e-9
    if ahead is None:  # pieces change nothing else
        assert timed([program], [[0, 1]], on).step_time_s == pytest.approx(end, rel=1e-12)
