"""Streams of a library's own: what torch's fully_shard hides, against times worked out by hand. What devices
of a node share: sends and collectives over a link between two sockets, by hand.
The host's clock: closed answers of small programs, and any program beside a loop over its events."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.clusters.rates import Host
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.simulator import steps
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import owners
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, Category, Kind, Program
from spbench.bench.measure.simulator.program_builder import CHECK, JOIN, MODULE, NODE, VIEW, ProgramBuilder
from spbench.bench.measure.simulator.simulate import Simulator, smallest_shifts
from spbench.bench.measure.simulator.steps import Steps
from spbench.bench.measure.simulator.substitutes import transfer_substitutes
from spbench.bench.measure.simulator.timeline import Timeline, trace_events
from spbench.bench.measure.simulator.waits import stream_names
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from tests.grid import data, tabled
from tests.measure.simulator.step_programs import chain, cluster, everyone, one_f_one_b, ring, serial_s, timed

GATHER, COPY = 1, 2


def layers(compute: Sequence[float], gather: float, *, ahead: bool, copy: float = 0.0) -> Program:
    """Layers whose weights are all-gathered by two ranks on a stream of their own, each after ``copy``
    seconds on another: as soon as those before are gathered, or else when the layer before has computed."""
    b = ProgramBuilder((1, 1, 1, 2))
    b.phase("forward")
    for seconds in compute:
        if not ahead:
            b.on_stream(0)
            computed = b.record()
            b.on_stream(COPY)
            b.wait(computed)
        b.on_stream(COPY)
        b.kernel("copy_in", flops=copy)
        copied = b.record()
        b.on_stream(GATHER)
        b.wait(copied)
        b.wait(b.collective("all_gather", 2 * gather, everyone(2)))
        gathered = b.record()
        b.on_stream(0)
        b.wait(gathered)
        b.kernel("layer", flops=seconds)
    return b.program()


@pytest.mark.parametrize(
    ("compute", "ahead", "step", "exposed"),
    [
        ((5, 5), True, 2 + 5 + 5, 2),  # the second gather, 2 s, behind the first layer
        ((5, 5), False, 2 + 5 + 2 + 5, 4),
        ((0.5, 5), True, 2 + 2 + 5, 3.5),  # behind half a second of it
    ],
)
def test_a_gather_is_hidden_behind_the_layer_before(
    compute: tuple[float, float], ahead: bool, step: float, exposed: float
) -> None:
    found = timed([layers(compute, 2, ahead=ahead)], [range(2)])
    assert found.step_time_s == step
    assert found.breakdown == {
        "compute_s": sum(compute),
        "exposed_communication_s": exposed,
        "hidden_communication_s": 4 - exposed,
        "bubble_s": 0,
        "overhead_s": 0,
    }


def test_copies_take_time_and_order_on_their_stream() -> None:
    # copies 0-1 and 1-2; gathers 1-3 and 3-5; layers 3-8 and 8-13
    found = timed([layers((5, 5), 2, ahead=True, copy=1)], [range(2)])
    assert found.step_time_s == 13
    assert found.breakdown["compute_s"] == 10
    assert found.breakdown["exposed_communication_s"] == 3
    assert found.breakdown["hidden_communication_s"] == 2  # the second copy moves beside the first gather
    shown = [(e.name, e.stream, e.start_s, e.duration_s) for e in found.events(1)]
    assert shown == [
        ("copy_in", "stream 2: copy_in", 0, 1),
        ("all_gather", "stream 1: all_gather", 1, 2),
        ("wait for stream 1: all_gather", "compute", 0, 3),
        ("layer", "compute", 3, 5),
        ("copy_in", "stream 2: copy_in", 1, 1),
        ("all_gather", "stream 1: all_gather", 3, 2),
        ("layer", "compute", 8, 5),
    ]
    named = {e["args"]["name"] for e in trace_events(found, [0]) if e["name"] == "thread_name"}
    assert named == {"phases", "compute", "stream 1: all_gather", "stream 2: copy_in"}


def test_what_is_hidden_costs_computing_time_where_a_device_loses_it() -> None:
    losing = cluster().model_dump()
    losing["device"]["overlap_loss"] = {"value": 0.5, "source": "made up"}
    found = timed([layers((5, 5), 2, ahead=True)], [range(2)], Cluster.model_validate(losing))
    assert found.step_time_s == 13  # half of the second gather's two seconds, at the wait for it
    assert found.breakdown["exposed_communication_s"] == 3
    assert found.breakdown["bubble_s"] == 0


@pytest.mark.parametrize(("block", "step"), [(5, 5 + 1), (1, 2)])
def test_a_message_that_is_hidden_costs_as_much_as_a_collective(block: float, step: float) -> None:
    """Half of an exchange's two seconds, once for both directions; none where it is waited for."""
    b = ProgramBuilder((1, 1, 1, 2))
    works = [b.send(2, (0, 0, 0, 1)), b.recv(2, (0, 0, 0, 1))]
    b.kernel("block", flops=block)
    for work in works:
        b.wait(work)
    losing = cluster().model_dump()
    losing["device"]["overlap_loss"] = {"value": 0.5, "source": "made up"}
    assert timed([b.program()], [range(2)], Cluster.model_validate(losing)).step_time_s == step


def test_waiting_for_a_rank_is_a_bubble_on_any_stream() -> None:
    late = ProgramBuilder((1, 1, 1, 2))
    late.kernel("late", flops=3)
    late.wait(late.collective("all_gather", 4, everyone(2)))
    found = timed([layers((5,), 2, ahead=True), late.program()], [[0], [1]])
    assert found.breakdown_of(0)["bubble_s"] == 3
    assert found.breakdown_of(0)["exposed_communication_s"] == 2


# -- fully_shard -----------------------------------------------------------------------------------------

#: of the two layers' matrices
WIDTH = 64


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def forward_of_two_layers(
    rows: int, on_its_own_streams: bool = True, prefetch: bool = False, rate: float = 1.0
) -> Timeline:
    """Forward of two layers on two ranks; a byte on a link takes a second, a FLOP 1 / ``rate``."""
    with tracing.fake_mesh({"dp": 2}, 0) as mesh, FakeTensorMode():
        model = TwoLayers()
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=mesh["dp"])
        if not on_its_own_streams:
            model._set_unshard_async_op(True)
        if prefetch:
            model.first.set_modules_to_forward_prefetch([model.second])
        recorder = Recorder(mesh, events=True)
        x = torch.empty(rows, WIDTH)
        with recorder, recorder.phase("forward"), torch.no_grad():
            model(x)
        program = recorder.events.program()
    return timed([program], [range(2)], cluster(rate=rate))


GATHER_S = WIDTH * WIDTH * 4 / 2
LAYER_S = 2 * WIDTH * WIDTH  # a row


@tabled(__file__, "fully_shard_gathers_the_second_layer_behind_the_first")
def test_fully_shard_gathers_the_second_layer_behind_the_first(how: dict[str, bool], hidden: bool) -> None:
    found = forward_of_two_layers(8, **how)
    exposed = GATHER_S if hidden else 2 * GATHER_S
    assert LAYER_S * 8 > GATHER_S
    assert found.step_time_s == pytest.approx(2 * 8 * LAYER_S + exposed)
    assert found.breakdown["exposed_communication_s"] == pytest.approx(exposed)
    assert found.breakdown["hidden_communication_s"] == pytest.approx(2 * GATHER_S - exposed)


def test_fully_shard_hides_no_more_than_the_layer_takes() -> None:
    found = forward_of_two_layers(1, rate=4)
    assert LAYER_S / 4 < GATHER_S
    assert found.step_time_s == pytest.approx(2 * GATHER_S + LAYER_S / 4)
    assert found.breakdown["hidden_communication_s"] == pytest.approx(LAYER_S / 4)


@pytest.mark.parametrize("recorder", [Recorder, FastRecorder])
def test_a_step_uses_the_streams_of_fully_shard(
    recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorder is Recorder:
        monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    program = tracing.trace(training(), events=True).program
    assert stream_names(program) == [
        "compute",
        "stream 1: _foreach_copy_, all_gather_copy_in",  # of float32 shards to bfloat16, then in their place
        "stream 2: all_gather",
        "stream 3: reduce_scatter",
    ]


def training(**options: int) -> Cell:
    return Cell(
        model="causal-transformer-tiny", strategy="single", sizes=Sizes(dp=4), batch=4, seq_len=32,
        precision="bf16", cluster="dgx-h100", training={"backend": "zero3", **options},
        model_options={"attention": "cudnn"},  # whose backward has no buffers, larger here than weights
    )  # fmt: skip


def test_recording_streams_moves_neither_memory_nor_bytes() -> None:
    plain, timed_too = tracing.trace(training()), tracing.trace(training(), events=True)
    assert timed_too.memory.events == plain.memory.events
    assert timed_too.memory.sizes == plain.memory.sizes
    assert timed_too.communication.counts == plain.communication.counts


def test_torchs_streams_come_back() -> None:
    names = ("Stream", "Event", "stream", "current_stream")
    before = [getattr(torch.cpu, name) for name in names]
    with tracing.fake_mesh({"dp": 2}, 0) as mesh, Recorder(mesh, events=True):
        assert [getattr(torch.cpu, name) for name in names] != before
    assert [getattr(torch.cpu, name) for name in names] == before


def test_more_prefetch_holds_more_weights_and_sends_the_same() -> None:
    few, many = training(), training(forward_prefetch=2, backward_prefetch=2)
    engine = virtual.VirtualEngine()
    first, second = engine.measure(few), engine.measure(many)
    assert first.communication == second.communication
    assert (second.peak_memory_bytes or 0) > (first.peak_memory_bytes or 0)
    with pytest.raises(ValueError, match="forward_prefetch is a number of blocks"):
        engine.measure(training(forward_prefetch=-1))


def node(devices: int = 8, **link: Any) -> Cluster:
    """Nodes of so many devices, whose links move a byte a second, with other figures of that link."""
    content = cluster(devices=devices, bandwidth=1e300).content
    content["node_link"] |= link
    return Cluster.model_validate({**content, "name": "made-up"})


def crossing(devices: int, bandwidth: float, **words: str) -> dict[str, Any]:
    figure = {"value": bandwidth, "source": "made up", **words}
    return {"devices": devices, "path": "SYS", "bandwidth_bytes_per_s": figure}


def costs(*crossings: dict[str, Any]) -> Costs:
    return Costs(node(crossings=list(crossings)), Calibration())


def test_sends_share_the_way_out_of_their_part() -> None:
    """In a ring of eight one send leaves each socket; where all ranks send to the other, four do."""
    on, ranks = costs(crossing(4, 0.5)), range(8)
    neighbours = on.transfers(ranks, [(r + 1) % 8 for r in ranks], 1)[1]
    assert neighbours.tolist() == [1, 1, 1, 2, 1, 1, 1, 2]
    assert on.transfers(ranks, [(r + 4) % 8 for r in ranks], 1)[1].tolist() == [8.0] * 8
    # a way out that is wider than all links together slows nothing down
    assert set(costs(crossing(4, 100.0)).transfers(ranks, [(r + 4) % 8 for r in ranks], 1)[1]) == {1.0}


def test_collectives_take_at_least_what_leaves_a_part_takes() -> None:
    whole, halves, pairs = [list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[r, r + 4] for r in range(4)]
    free, on = costs(), costs(crossing(4, 0.5))
    for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
        assert on.collectives(kind, 8.0, halves) == free.collectives(kind, 8.0, halves), kind
    # 4 x 4 pieces of one byte each leave a socket, at half a byte a second
    assert on.collectives("all_to_all", 8.0, whole) == [32.0]
    # a ring of all eight leaves each socket once: 7 bytes a hop
    assert on.collectives("all_gather", 8.0, whole) == [14.0]
    assert on.collectives("broadcast", 8.0, whole) == [16.0]
    # four rings of two share it: 4 bytes a hop each
    assert on.collectives("all_gather", 8.0, pairs) == [32.0] * 4


def test_the_narrowest_of_several_crossings_counts() -> None:
    below, above = crossing(2, 0.25), crossing(4, 4.0)
    assert costs(below, above).collectives("all_gather", 8.0, [list(range(8))]) == [28.0]
    assert costs(above).collectives("all_gather", 8.0, [list(range(8))]) == [7.0]


def test_a_world_is_not_folded_over_a_crossing() -> None:
    """All ranks of a ring do the same, yet the send between sockets takes longer than the others."""
    on = node(crossings=[crossing(4, 0.1)])
    programs, ranks = [ring(8, 1.0, 1.0, overlap=False)], [range(8)]
    assert smallest_shifts(programs, owners(programs, ranks), node()) == (1, 1, 1, 1)
    assert smallest_shifts(programs, owners(programs, ranks), on) == (1, 1, 1, 4)
    folded, whole = (Simulator(programs, ranks, on, fold=fold)().step_time_s for fold in (True, False))
    assert folded == whole > Simulator(programs, ranks, node())().step_time_s


def names(on: Cluster) -> set[tuple[str, str, str]]:
    b = ProgramBuilder((1, 1, 1, 8))
    b.wait(b.collective("all_gather", 8.0, everyone(8)))
    b.wait(b.send(1.0, (0, 0, 0, 1)))  # the first rank's peer is in its part; that of the fourth is not
    b.wait(b.recv(1.0, (0, 0, 0, -1)))
    ranks = np.arange(8)
    found = transfer_substitutes(Costs(on, Calibration()), Steps(b.program(), ranks, ranks))
    return {tuple(each) for each, _ in found if each.by != "the bandwidth of a send"}


def test_what_is_not_known_of_crossings_is_named() -> None:
    assert names(node()) == names(node(crossings=[crossing(4, 1.0)])) == set()
    unknown = "links that no devices share"
    assert names(node(crossings=None)) == {
        ("send intra-node", unknown, "extrapolated"),
        ("all_gather intra-node", unknown, "extrapolated"),
    }
    others = node(crossings=[crossing(4, 1.0, substitute="another machine's")])
    assert names(others) == {
        ("send intra-node (SYS)", "another machine's", "substituted"),
        ("all_gather intra-node (SYS)", "another machine's", "substituted"),
    }


@pytest.mark.parametrize("devices", [(3,), (8,), (4, 4), (4, 2)])
def test_parts_divide_each_other_and_the_node(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=r"node_link.crossings: parts of .* do not divide a node of 8"):
        node(crossings=[crossing(each, 1.0) for each in devices])


FIGURES = data(__file__)["FIGURES"]


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
    b.kernel("samples_begun", nbytes=24, category=Category.HOST_READ)
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


@pytest.mark.parametrize(
    ("graphs", "host_s"), [("none", 2 + 8 + 1 + 2), ("layers", 1 + 2), ("full_iteration", 2)]
)
def test_the_host_has_no_work_for_what_graphs_launch(graphs: str, host_s: float) -> None:
    """A kernel in forward, a module's kernel and a collective in backward, and a kernel of the optimizer."""
    b = kernels(0.0)
    b.phase("backward")
    b.host_work += MODULE
    b.kernel("mm", flops=0)
    b.collective("all_reduce", 0, everyone(1))
    b.phase("optimizer")
    b.kernel("mm", flops=0)
    figures = host(operator_s=2.0, collective_s=1.0, module_s=6.0)
    assert steps.host_seconds(figures, b.program(), graphs).sum() == host_s


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
    monkeypatch.setattr(steps, "PIECE", 1)
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
    monkeypatch.setattr(steps, "PIECE", 1)
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
        b.host_work += draw(st.sampled_from([0, VIEW, NODE, 2 * MODULE, JOIN, JOIN + VIEW, CHECK, CHECK]))
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
    now, free, launched, checked = hosts.seconds("step_s"), 0.0, 0, list[float]()
    for event, kind in enumerate(program.kind.tolist()):
        stream, partner = int(program.stream[event]), int(program.partner[event])
        *counts, joins, checks = program.host[event].tolist()
        if checks:
            now = max(now, *checked[-3:-2], 0.0)
            checked.append(clocks[COMPUTE_STREAM])
        if joins:
            now = max(now, clocks[COMPUTE_STREAM])
        now += sum(n * s for n, s in zip(counts, figures, strict=True))
        now += (
            hosts.seconds({Kind.KERNEL: "operator_s", Kind.COLLECTIVE: "collective_s"}[kind])
            if kind in (Kind.KERNEL, Kind.COLLECTIVE)
            else 0
        )
        if kind == Kind.KERNEL and stream == COMPUTE_STREAM:
            launched += 1
            starts.append(max(clocks[stream], now + latency))
            clocks[stream] = starts[-1] + kernel_s[event] + costs.launch_s
        done.append((launched, clocks[COMPUTE_STREAM]))
        now = max(now, *[clock for count, clock in done if count <= launched - ahead][-1:], 0.0)
        if kind == Kind.KERNEL and stream != COMPUTE_STREAM:
            starts.append(max(clocks[stream], now + latency))
            clocks[stream] = ends[event] = starts[-1] + kernel_s[event] + costs.launch_s
        elif kind == Kind.COLLECTIVE:
            starts.append(max(clocks[stream], now + latency, free))
            free = ends[event] = (
                starts[-1] + costs.collectives("all_reduce", float(program.nbytes[event]), [[0, 1]])[0]
            )
        elif kind == Kind.WAIT:
            clocks[stream] = max(clocks[stream], ends[partner])
            starts.append(clocks[stream])
        elif kind == Kind.RECORD:
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
        patch.setattr(steps, "PIECE", 1)
        found = timed([program], [[0, 1]], on)
    starts, end = event_by_event(program, on)
    assert found.step_time_s == pytest.approx(end, rel=1e-12)
    loud = [i for i, kind in enumerate(program.kind) if kind in (Kind.KERNEL, Kind.COLLECTIVE)]
    seen = [e.start_s for e in found.events(1) if not e.name.startswith("wait for")]
    assert seen == pytest.approx([starts[i] for i in loud], rel=1e-12)
    parts = found.breakdown_of(0)
    assert min(parts.values()) >= -1e-9
    assert sum(s for name, s in parts.items() if name != "hidden_communication_s") == pytest.approx(end)
    assert end <= serial_s(found) + 1e-9
    if ahead is None:  # pieces change nothing else
        assert timed([program], [[0, 1]], on).step_time_s == pytest.approx(end, rel=1e-12)
