"""The timeline meter: what it writes down of a step on fake ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.simulator.program import (
    ATTENTION,
    COLLECTIVE,
    KERNEL,
    MATMUL,
    RECV,
    SEND,
    WAIT,
    Program,
)
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.kernels.softmax import masked_softmax

TINY = {"layers": 2, "dropout": 0.1}


def written(body: Callable[[], object], rank: int = 0) -> Program:
    """The program of what ``body`` does on a fake rank of four."""
    with tracing.fake_mesh({"sp": 4}, rank) as mesh:
        recorder = Recorder(mesh, events=True)
        with FakeTensorMode(), recorder:
            torch.zeros(100)  # set-up is not part of the step
            with recorder.phase("forward"):
                body()
        assert recorder.events is not None
        return recorder.events.program()


def kernels(program: Program) -> list[tuple[str, float, float]]:
    """(name, FLOPs, bytes) of each kernel."""
    return [
        (program.names[program.name[i]], program.flops[i], program.nbytes[i])
        for i in np.flatnonzero(program.kind == KERNEL)
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
    assert set(program.category) == {MATMUL}


def test_blocks_of_wider_matrices_are_counted() -> None:
    def body() -> None:
        scores = torch.empty(2, 3, 8)
        q, k = torch.empty(2, 3, 5), torch.empty(2, 4, 5)
        torch.bmm(q, k.transpose(1, 2), out=scores.split(4, 2)[1])  # writes a block; the transpose is dense
        torch.bmm(q, k.transpose(1, 2))

    program = written(body)
    assert program.strided[program.kind == KERNEL].tolist() == [2 * 3 * 4, 0]


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
    assert program.category.tolist() == [ATTENTION, ATTENTION]
    assert program.flops.tolist() == [0, 2 * 2 * (8 * 8 * 4) * 2]


def kinds(program: Program) -> list[int]:
    return program.kind[program.kind != KERNEL].tolist()


def test_waits_stand_where_the_code_waits() -> None:
    def body() -> None:
        x = torch.ones(4)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        x + 1
        assert work is not None
        work.wait()

    program = written(body)
    events = [int(k) for k in program.kind if k != KERNEL]
    assert events == [COLLECTIVE, WAIT, COLLECTIVE, WAIT]
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
    assert kinds(program) == [SEND, RECV, WAIT, WAIT, SEND, WAIT]
    posts = program.partner[(program.kind == SEND) | (program.kind == RECV)]
    assert [program.peers[p] for p in posts] == [(1, 0, 0, 0, 0), (3, 0, 0, 0, 0), (1, 0, 0, 0, 0)]
    assert program.nbytes[program.kind == SEND].tolist() == [24, 24]


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
        assert recorder.events is not None
        program = recorder.events.program()
    assert [g.axes for g in program.groups] == [(0,), (1,)]
    assert program.groups[0].members(6, program.mesh) == (2, 6)
    assert program.groups[1].members(6, program.mesh) == (4, 5, 6, 7)
    assert program.nbytes[program.kind == COLLECTIVE].tolist() == [24, 48]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("ring_self_attention", Sizes(sp=4)), ("tensor_parallel", Sizes(tp=4)), ("single", Sizes())],
)
def test_a_step_agrees_with_the_other_meters(strategy: str, sizes: Sizes) -> None:
    cell = Cell(model="bert-tiny", strategy=strategy, sizes=sizes, batch=2, seq_len=32, model_options=TINY)
    trace = tracing.trace(cell, events=True)
    program = trace.program
    assert program is not None
    posted = {"send": 0, "recv": 0, "all_reduce": 0}
    for operation, count in trace.communication.counts.items():
        posted[operation.collective] += count * operation.payload_bytes
    for name, kind in (("send", SEND), ("recv", RECV), ("all_reduce", COLLECTIVE)):
        assert program.nbytes[program.kind == kind].sum() == posted[name]
    assert [name for name, _ in program.marks] == ["forward", "backward", "gradient_sync", "optimizer"]
    # every communication of these strategies is waited for at once
    assert (program.kind == WAIT).sum() == np.isin(program.kind, (SEND, RECV, COLLECTIVE)).sum()


def test_flops_are_those_of_torchs_own_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")  # the counter sees no operator that is remembered
    cell = Cell(model="bert-tiny", strategy="single", batch=2, seq_len=32, model_options=TINY)
    program = tracing.trace(cell, events=True).program
    assert program is not None
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
    assert found.step_time_s is not None
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
