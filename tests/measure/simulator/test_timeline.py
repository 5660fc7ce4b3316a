"""The timeline meter: what it writes down of a step on fake ranks. What a simulated step is made of, against
answers known beforehand. Exported traces: what Perfetto needs to find in them."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spbench.bench.cell import Cell, Sizes
from spbench.bench.errors import UserError
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.simulator.program import Category, Flops, Group, Kind, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.kernels.softmax import masked_softmax
from tests.bench.hosts import files_of_at_most
from tests.measure.simulator.step_programs import chain, cluster, everyone, one_f_one_b, ring, timed

TINY = {"layers": 2, "dropout": 0.1}


def written(body: Callable[[], object], rank: int = 0) -> Program:
    """The program of what ``body`` does on a fake rank of four."""
    with tracing.fake_mesh({"sp": 4}, rank) as mesh:
        recorder = Recorder(mesh, events=True)
        with FakeTensorMode(), recorder:
            torch.zeros(100)  # set-up is not part of the step
            with recorder.phase("forward"):
                body()
        return recorder.events.program()


def kernels(program: Program) -> list[tuple[str, float, float]]:
    """(name, FLOPs, bytes) of each kernel."""
    return [
        (program.names[program.name[i]], program.flops[i], program.nbytes[i])
        for i in np.flatnonzero(program.kind == Kind.KERNEL)
    ]


def test_matrix_products_have_shapes_flops_and_bytes() -> None:
    def body() -> None:
        a, b = torch.empty(3, 4, 5, dtype=torch.float16), torch.empty(3, 5, 6, dtype=torch.float16)
        out = torch.bmm(a, b)
        out.baddbmm_(a, b)
        torch.addmm(torch.empty(6), torch.empty(4, 5), torch.empty(5, 6))

    program = written(body)
    assert kernels(program) == [
        ("bmm", 2 * 3 * 4 * 5 * 6, 2 * (60 + 90 + 72)),
        ("baddbmm_", 720, 2 * (60 + 90 + 2 * 72)),
        ("addmm", 240, 4 * (6 + 20 + 30 + 24)),
    ]
    assert program.shape.tolist() == [[3, 4, 6, 5], [3, 4, 6, 5], [1, 4, 6, 5]]
    assert program.precision.tolist() == [0, 0, 2]
    assert set(program.category) == {Category.MATMUL}


def test_blocks_of_wider_matrices_are_counted() -> None:
    def body() -> None:
        scores = torch.empty(2, 3, 8)
        q, k = torch.empty(2, 3, 5), torch.empty(2, 4, 5)
        torch.bmm(q, k.transpose(1, 2), out=scores.split(4, 2)[1])  # writes a block; the transpose is dense
        torch.bmm(q, k.transpose(1, 2))

    program = written(body)
    assert program.strided[program.kind == Kind.KERNEL].tolist() == [2 * 3 * 4, 0]


def test_views_and_empty_tensors_cost_nothing() -> None:
    def body() -> None:
        x = torch.empty(4, 6)
        x.view(6, 4).t().unsqueeze(0).expand(5, 4, 6).detach()[1:].split(2, -1)
        torch.empty_like(x)
        x.new_empty(3)

    assert kernels(written(body)) == []


def test_memory_bound_operators_move_what_they_read_and_write() -> None:
    def body() -> None:
        x, y = torch.empty(10), torch.empty(10)
        x + y
        x.add_(y)
        x.copy_(y)
        x.zero_()
        torch.nn.functional.embedding(torch.empty(7, dtype=torch.int64), torch.empty(1000, 5))

    assert kernels(written(body)) == [
        ("add", 0, 120),
        ("add_", 0, 120),
        ("copy_", 0, 80),
        ("zero_", 0, 40),
        ("embedding", 0, 7 * 8 + 2 * 7 * 5 * 4),
    ]


def test_attention_kernels_are_told_apart() -> None:
    def body() -> None:
        masked_softmax(torch.empty(1, 2, 3, 4), None, 1.0, "fused")
        q = torch.empty(1, 2, 8, 4)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)

    program = written(body)
    names = [name for name, _, _ in kernels(program)]
    assert names == ["masked_softmax", "_scaled_dot_product_flash_attention_for_cpu"]
    assert program.category.tolist() == [Category.ATTENTION, Category.ATTENTION]
    assert program.flops.tolist() == [0, 2 * 2 * (8 * 8 * 4) * 2]


def kinds(program: Program) -> list[int]:
    return program.kind[program.kind != Kind.KERNEL].tolist()


def test_waits_stand_where_the_code_waits() -> None:
    def body() -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        x + 1
        work.wait()

    program = written(body)
    events = [int(k) for k in program.kind if k != Kind.KERNEL]
    assert events == [Kind.COLLECTIVE, Kind.WAIT, Kind.COLLECTIVE, Kind.WAIT]
    order = [program.names[n] for n in program.name]
    assert order == ["ones", "all_reduce", "wait", "all_reduce", "add", "wait"]
    assert program.partner[-1] == 3


def test_transfers_are_kept_relative() -> None:
    def body() -> None:
        group = dist.distributed_c10d._get_default_group()
        x, y = torch.empty(6), torch.empty(6)
        exchange = [dist.P2POp(dist.isend, x, 3, group), dist.P2POp(dist.irecv, y, 1, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        dist.send(x, 3)

    program = written(body, rank=2)
    assert kinds(program) == [Kind.SEND, Kind.RECV, Kind.WAIT, Kind.WAIT, Kind.SEND, Kind.WAIT]
    posts = program.partner[(program.kind == Kind.SEND) | (program.kind == Kind.RECV)]
    assert [program.peers[p] for p in posts] == [(1, 0, 0, 0, 0), (3, 0, 0, 0, 0), (1, 0, 0, 0, 0)]
    assert program.nbytes[program.kind == Kind.SEND].tolist() == [24, 24]


@pytest.mark.parametrize("rank", [0, 5])
def test_groups_are_kept_by_axis(rank: int) -> None:
    sizes = {"dp": 2, "sp": 4}

    def gather(group: dist.ProcessGroup, size: int) -> None:
        parts: Sequence[Tensor] = [torch.empty(3) for _ in range(size)]
        dist.all_gather(list(parts), torch.empty(3), group=group)

    with tracing.fake_mesh(sizes, rank) as mesh:
        recorder = Recorder(mesh, events=True)
        with FakeTensorMode(), recorder, recorder.phase("forward"):
            gather(mesh.get_group("dp"), 2)
            gather(mesh.get_group("sp"), 4)
        program = recorder.events.program()
    assert [g.axes for g in program.groups] == [(0,), (1,)]
    assert program.groups[0].members(6, program.mesh) == (2, 6)
    assert program.groups[1].members(6, program.mesh) == (4, 5, 6, 7)
    assert program.nbytes[program.kind == Kind.COLLECTIVE].tolist() == [24, 48]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("ring_self_attention", Sizes(sp=4)), ("tensor_parallel", Sizes(tp=4)), ("single", Sizes())],
)
def test_a_step_agrees_with_the_other_meters(strategy: str, sizes: Sizes) -> None:
    cell = Cell(model="bert-tiny", strategy=strategy, sizes=sizes, batch=2, seq_len=32, model_options=TINY)
    trace = tracing.trace(cell, events=True)
    program = trace.program
    posted = {"send": 0, "recv": 0, "all_reduce": 0}
    for operation, count in trace.communication.counts.items():
        posted[operation.collective] += count * operation.payload_bytes
    for name, kind in (("send", Kind.SEND), ("recv", Kind.RECV), ("all_reduce", Kind.COLLECTIVE)):
        assert program.nbytes[program.kind == kind].sum() == posted[name]
    assert [name for name, _ in program.marks] == ["forward", "backward", "gradient_sync", "optimizer"]
    # every communication of these strategies is waited for at once
    assert (program.kind == Kind.WAIT).sum() == np.isin(
        program.kind, (Kind.SEND, Kind.RECV, Kind.COLLECTIVE)
    ).sum()


def test_flops_are_those_of_torchs_own_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")  # the counter sees no operator that is remembered
    cell = Cell(model="bert-tiny", strategy="single", batch=2, seq_len=32, model_options=TINY)
    program = tracing.trace(cell, events=True).program
    counter = FlopCounterMode(display=False)
    with counter:
        tracing.trace(cell)
    assert program.flops.sum() == counter.get_total_flops() > 0


def test_memory_and_communication_are_the_same_with_and_without() -> None:
    cell = Cell(model="bert-tiny", strategy="ring_self_attention", sizes=Sizes(sp=4), batch=2, seq_len=32)
    plain, timed = tracing.trace(cell), tracing.trace(cell, events=True)
    assert timed.memory.events == plain.memory.events
    assert timed.memory.sizes == plain.memory.sizes
    assert timed.communication.counts == plain.communication.counts


def test_the_virtual_engine_fills_in_times_where_rates_are_known() -> None:
    cell = Cell(model="bert-tiny", strategy="ring_self_attention", sizes=Sizes(sp=4), batch=2, seq_len=32)
    assert VirtualEngine().measure(cell).step_time_s is None  # local: no rates
    found = VirtualEngine().measure(cell.model_copy(update={"cluster": "dgx-a100"}))
    assert found.tokens_per_s == pytest.approx(2 * 32 / found.step_time_s)
    parts = {k: v for k, v in found.breakdown.items() if k != "hidden_communication_s"}
    assert sum(parts.values()) == pytest.approx(found.step_time_s)
    assert found.calibration == "uncalibrated"


def test_copies_into_a_part_of_a_buffer_move_that_part_alone() -> None:
    def body() -> None:
        parts, whole = [torch.empty(6), torch.empty(4)], torch.empty(40)
        torch.ops.fsdp.all_gather_copy_in(parts, whole, [6, 4], 10, 1)
        torch._foreach_copy_(list(whole[:10].split([6, 4])), parts)

    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # which registers the first

    assert kernels(written(body)) == [("all_gather_copy_in", 0, 80), ("_foreach_copy_", 0, 80)]


def test_kernels_are_told_apart_by_their_kind() -> None:
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=2, category=Category.MATMUL)
    b.kernel("flash", flops=3, category=Category.ATTENTION)
    b.kernel("softmax", nbytes=5, category=Category.ATTENTION)  # computes nothing: it moves scores
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
    b.kernel("mm", flops=2, strided=3, category=Category.MATMUL)
    b.kernel("mm", flops=5, category=Category.MATMUL)
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
    b.kernel("outside", flops=100, category=Category.MATMUL)
    for phase in ("forward", "backward", "forward"):
        b.phase(phase)
        b.kernel("mm", flops=2, category=Category.MATMUL)
        b.kernel("flash", flops=3, category=Category.ATTENTION)
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


def exported(timeline: Timeline, path: Path, ranks: list[int]) -> dict[str, Any]:
    timeline.export(path / "trace.json", ranks)
    return json.loads((path / "trace.json").read_text())


def slices(trace: dict[str, Any], rank: int, row: str) -> list[dict[str, Any]]:
    """The slices of a row of a rank, in order of time."""
    threads = {
        e["args"]["name"]: e["tid"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == rank
    }
    found = [
        e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, threads[row])
    ]
    return sorted(found, key=lambda e: e["ts"])


def test_one_process_a_rank_with_named_rows(tmp_path: Path) -> None:
    trace = exported(timed([ring(4, 3, 2, overlap=True)], [range(4)]), tmp_path, [0, 2])
    named = {(e["pid"], e["args"].get("name")) for e in trace["traceEvents"] if e["ph"] == "M"}
    for rank in (0, 2):
        assert {(rank, f"rank {rank}"), (rank, "compute"), (rank, "communication")} <= named
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 2}
    assert trace["otherData"] == {"step_time_s": 12.0, "world_size": 4}


def test_slices_carry_times_in_microseconds_and_details(tmp_path: Path) -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.phase("forward")
    b.kernel("mm", flops=3, nbytes=7)
    b.wait(b.collective("all_reduce", 4, everyone(2)))
    trace = exported(timed([b.program()], [[0, 1]]), tmp_path, [1])
    kernel, waiting = slices(trace, 1, "compute")
    assert (kernel["name"], kernel["ts"], kernel["dur"]) == ("mm", 0, 3e6)
    assert kernel["args"] == {
        "phase": "forward", "bytes": 7, "flops": 3, "class": "memory-bound", "dtype": "fp32",
    }  # fmt: skip
    assert (waiting["name"], waiting["ts"], waiting["dur"]) == ("wait for all_reduce", 3e6, 4e6)
    (reduce,) = slices(trace, 1, "communication")
    assert (reduce["name"], reduce["ts"], reduce["dur"]) == ("all_reduce", 3e6, 4e6)
    assert reduce["args"] == {"phase": "forward", "bytes": 4, "posted_s": 3.0, "ranks": [0, 1]}


def test_transfers_name_their_ends(tmp_path: Path) -> None:
    trace = exported(timed(*chain(4, 3, 2)), tmp_path, [2])
    received, sent = slices(trace, 2, "communication")
    assert (received["args"]["source"], received["args"]["destination"]) == (1, 2)
    assert (sent["args"]["source"], sent["args"]["destination"]) == (2, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_slices_of_a_row_do_not_overlap(tmp_path: Path, overlap: bool) -> None:
    worlds = [([ring(4, 1, 2, overlap=overlap)], [range(4)]), one_f_one_b(4, 6, 1.0, 2.0, nbytes=0.5)]
    for programs, ranks in worlds:
        timeline = timed(programs, ranks)
        trace = exported(timeline, tmp_path, [0, 1])
        rows = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
        for pid, tid in rows:
            row = sorted(
                (e["ts"], e["ts"] + e["dur"])
                for e in trace["traceEvents"]
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
            )
            assert all(after[0] >= before[1] - 1e-3 for before, after in pairwise(row))
            assert row[-1][1] <= timeline.step_time_s * 1e6 + 1e-3


def test_phases_have_a_row_of_their_own(tmp_path: Path) -> None:
    trace = exported(timed(*one_f_one_b(2, 2, 1.0, 2.0)), tmp_path, [1])
    assert [e["name"] for e in slices(trace, 1, "phases")] == ["forward", "backward"] * 2


def test_a_trace_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    timeline, path = timed([ring(4, 3, 2, overlap=True)], [range(4)]), tmp_path / "trace.json"
    timeline.export(path)
    earlier = path.read_bytes()
    with (
        files_of_at_most(100),
        pytest.raises(UserError, match=r"^cannot write .*trace\.json: File too large$"),
    ):
        timeline.export(path, [0, 1, 2, 3])
    assert path.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [path]
