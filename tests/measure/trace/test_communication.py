"""The communication meter: the bytes of each collective by hand, phases, axes, and nothing passed over."""

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.simulator.program import COLLECTIVE, WAIT
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation, as_number
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.collectives import ring
from spbench.impls.traffic import WIRE_SHARE, Traffic, wire_bytes


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 1 of four ranks that chunk the sequence."""
    with fake_mesh({"sp": 4}, 1) as mesh:
        yield mesh


def metered(mesh: DeviceMesh, work: Callable[[], Any], phase: str = "forward") -> CommunicationMeter:
    recorder = Recorder(mesh)
    with recorder, recorder.phase(phase):
        work()
    return recorder.communication


WHOLE, PART = 96, 24  # elements of float32 that four ranks hold together, and that each holds


def whole() -> torch.Tensor:
    return torch.zeros(WHOLE)


def part() -> torch.Tensor:
    return torch.zeros(PART)


def parts() -> list[torch.Tensor]:
    return [part() for _ in range(4)]


#: what is called, its name in the rows, its payload, and what a rank of four sends by a ring algorithm: all
#: of it is cut into quarters of 96 bytes; all-reduce takes 2 x 3 passes of a quarter, the others take 3
COLLECTIVES: list[tuple[Callable[[], Any], str, int, int]] = [
    (lambda: dist.all_reduce(whole()), "all_reduce", 384, 576),
    (lambda: dist.all_reduce(whole(), dist.ReduceOp.MAX), "all_reduce", 384, 576),
    (lambda: dist.all_reduce(whole().half()), "all_reduce", 192, 288),
    (lambda: dist.all_reduce_coalesced([whole(), part()]), "all_reduce", 480, 720),
    (lambda: dist.all_gather_into_tensor(whole(), part()), "all_gather", 384, 288),
    (lambda: dist.all_gather(parts(), part()), "all_gather", 384, 288),
    (lambda: dist.reduce_scatter_tensor(part(), whole()), "reduce_scatter", 384, 288),
    (lambda: dist.reduce_scatter(part(), parts()), "reduce_scatter", 384, 288),
    (lambda: dist.all_to_all_single(whole(), whole()), "all_to_all", 384, 288),
    (lambda: dist.all_to_all(parts(), parts()), "all_to_all", 384, 288),
    (lambda: dist.broadcast(whole(), 0), "broadcast", 384, 288),
    (lambda: dist.reduce(whole(), 0), "reduce", 384, 288),
    (lambda: dist.send(part(), 2), "send", 96, 96),
    (lambda: dist.recv(part(), 0), "recv", 96, 0),
    (lambda: dist.barrier(), "barrier", 0, 0),
]


@pytest.mark.parametrize(("work", "collective", "payload", "sent"), COLLECTIVES)
def test_bytes_of_each_collective(
    mesh: DeviceMesh, work: Callable[[], Any], collective: str, payload: int, sent: int
) -> None:
    (row,) = metered(mesh, work).rows()
    assert row["collective"] == collective
    assert (row["count"], row["group_size"]) == (1, 4)
    assert (row["payload_bytes"], row["sent_bytes"]) == (payload, sent)


def test_every_collective_of_the_closed_forms_was_tried() -> None:
    assert {collective for _, collective, _, _ in COLLECTIVES} == set(WIRE_SHARE)


@pytest.mark.parametrize(
    "work",
    [
        lambda: dist.gather(part(), None, 0),
        lambda: dist.scatter(part(), None, 0),
    ],
)
def test_what_is_not_known_is_an_error(mesh: DeviceMesh, work: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match="communication meter does not know"):
        metered(mesh, work)


#: as COLLECTIVES, of the functional collectives that DTensor and torch.compile call
FUNCTIONAL: list[tuple[Callable[[dist.ProcessGroup], Any], str, int, int]] = [
    (lambda group: functional.all_reduce(whole(), "sum", group), "all_reduce", 384, 576),
    (lambda group: functional.all_reduce_coalesced([whole(), part()], "sum", group), "all_reduce", 480, 720),
    (lambda group: functional.broadcast(whole(), 0, group), "broadcast", 384, 288),
    (lambda group: functional.all_gather_tensor(part(), 0, group), "all_gather", 384, 288),
    (lambda group: functional.reduce_scatter_tensor(whole(), "sum", 0, group), "reduce_scatter", 384, 288),
    (lambda group: functional.all_to_all_single(whole(), None, None, group), "all_to_all", 384, 288),
]


@pytest.mark.parametrize(("work", "collective", "payload", "sent"), FUNCTIONAL)
def test_bytes_of_each_functional_collective(
    mesh: DeviceMesh, work: Callable[[dist.ProcessGroup], Any], collective: str, payload: int, sent: int
) -> None:
    def waited() -> None:
        result = work(mesh.get_group("sp"))
        for x in result if isinstance(result, list) else [result]:
            x.wait()

    (row,) = metered(mesh, waited).rows()
    assert (row["collective"], row["axis"], row["count"], row["group_size"]) == (collective, "sp", 1, 4)
    assert (row["payload_bytes"], row["sent_bytes"]) == (payload, sent)


def step_of_dtensors(mesh: DeviceMesh) -> dict[Operation, int]:
    """What a rank sends in a step of tensors that torch lays out: a sharded product, gathered."""
    recorder, group = Recorder(mesh), mesh["sp"]
    with recorder, recorder.phase("forward"):
        x = DTensor.from_local(torch.ones(6, 8, requires_grad=True), group, [Shard(0)])
        w = DTensor.from_local(torch.ones(8, 5), group, [Replicate()]).requires_grad_()
        y: DTensor = (x @ w).redistribute(placements=[Replicate()])  # type: ignore[assignment]
        y.to_local().sum().backward()
        gradient = w.grad
        assert isinstance(gradient, DTensor)
        gradient.redistribute(placements=[Replicate()]).to_local()
    return dict(recorder.communication.counts)


def test_dtensors_send_the_same_on_virtual_and_real_ranks(pool: RankPool) -> None:
    with fake_mesh({"sp": 2}, 0) as mesh, FakeTensorMode():
        virtually = step_of_dtensors(mesh)
    # the rows of y [12, 5], and the gradient of w [8, 5], to which each rank has contributed
    assert virtually == {
        Operation("forward", "all_gather", "sp", 2, 12 * 5 * 4): 1,
        Operation("forward", "all_reduce", "sp", 2, 8 * 5 * 4): 1,
    }
    assert pool.run({"sp": 2}, step_of_dtensors) == [virtually, virtually]


def test_the_wait_for_a_functional_collective_is_in_the_program(mesh: DeviceMesh) -> None:
    recorder = Recorder(mesh, events=True)
    with FakeTensorMode(), recorder, recorder.phase("forward"):
        summed = torch.ops._c10d_functional.all_reduce(whole(), "sum", mesh.get_group("sp").group_name)
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        del product
        torch.ops._c10d_functional.wait_tensor(summed)
    program = recorder.events.program()
    kinds = [kind for kind in program.kind.tolist() if kind in (COLLECTIVE, WAIT)]
    assert kinds == [COLLECTIVE, WAIT]
    posted, waited = (int(np.flatnonzero(program.kind == kind)[0]) for kind in (COLLECTIVE, WAIT))
    assert program.partner[waited] == posted
    assert "mm" in [program.names[n] for n in program.name[posted:waited]]


def test_rows_are_by_phase_collective_and_axis() -> None:
    with fake_mesh({"dp": 2, "tp": 2, "sp": 3}, 5) as mesh:
        recorder = Recorder(mesh)
        with recorder:
            for phase, axis in itertools.product(("forward", "backward"), ("tp", "sp")):
                with recorder.phase(phase):
                    dist.all_reduce(whole(), group=mesh.get_group(axis))
                    dist.all_reduce(part(), group=mesh.get_group(axis))
            with recorder.phase("gradient_sync"):
                dist.all_reduce(whole(), group=mesh.get_group("dp"))
                dist.all_reduce(whole())
    rows = {(r["phase"], r["axis"]): r for r in recorder.communication.rows()}
    assert len(rows) == 6
    for phase in ("forward", "backward"):
        tp, sp = rows[phase, "tp"], rows[phase, "sp"]
        assert (tp["group_size"], tp["count"], tp["payload_bytes"], tp["sent_bytes"]) == (2, 2, 480, 480)
        assert (sp["group_size"], sp["count"], sp["payload_bytes"], sp["sent_bytes"]) == (3, 2, 480, 640)
    assert rows["gradient_sync", "dp"]["group_size"] == 2
    assert rows["gradient_sync", "world"]["group_size"] == 12
    assert rows["gradient_sync", "world"]["sent_bytes"] == 384 * 2 * 11 // 12
    totals = recorder.communication.sent_bytes()
    assert totals["forward", "all_reduce"] == 480 + 640
    assert totals["gradient_sync", "all_reduce"] == 384 + 704


def test_bytes_that_do_not_divide_are_exact() -> None:
    with fake_mesh({"sp": 3}, 0) as mesh:
        meter = metered(mesh, lambda: [dist.all_reduce(torch.zeros(1)) for _ in range(3)])
    assert meter.sent_bytes() == {("forward", "all_reduce"): Fraction(16)}  # thrice 4 * 4/3
    assert (as_number(Fraction(16)), as_number(Fraction(16, 3))) == (16, 16 / 3)
    assert isinstance(as_number(Fraction(16)), int)


def test_one_rank_sends_nothing() -> None:
    assert all(wire_bytes(name, 4096, 1) == 0 for name in set(WIRE_SHARE) - {"send"})
    with fake_mesh({}, 0) as mesh:
        assert [owner for owner, _ in ring(part(), mesh.get_group("sp"))] == [0]
        assert metered(mesh, lambda: list(ring(part(), mesh.get_group("sp")))).rows() == []


def test_ring_sends_all_chunks_but_one(mesh: DeviceMesh) -> None:
    owners: list[int] = []

    def work() -> None:
        owners.extend(owner for owner, _ in ring(part(), mesh.get_group("sp")))

    rows = {row["collective"]: row for row in metered(mesh, work).rows()}
    assert owners == [1, 0, 3, 2]
    assert {
        name: (row["count"], row["payload_bytes"], row["sent_bytes"], row["axis"])
        for name, row in rows.items()
    } == {
        "send": (3, 288, 288, "sp"),
        "recv": (3, 288, 0, "sp"),
    }


def test_buffers_that_are_filled_from_others_are_communications(mesh: DeviceMesh) -> None:
    recorder = Recorder(mesh)
    with recorder, recorder.phase("forward"):
        gathered, received = whole(), part()
        dist.all_gather_into_tensor(gathered, part())
        dist.recv(received, 0)
        del received
    peak = recorder.memory.stop().peak()
    assert peak.held["communication_buffers"] == 512 + 512
    assert peak.held["temporaries"] == 512  # what this rank gave


def test_closed_form_entry() -> None:
    entry = Traffic("forward", "", "all_reduce", 5, 384)
    assert entry.sent_bytes(4) == 5 * 576
    assert entry.sent_bytes(1) == 0
