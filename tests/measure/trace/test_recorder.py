"""The recorder: further meters beside its own, and nothing left patched. What operators return is remembered,
or worked out, as torch's fake tensors say it; pieces that are joined at once are not cut. In whose forward or
backward storages are made.
What the event log counts of the host's work between two events, on either path.
The communication meter: the bytes of each collective by hand, phases, axes, and nothing passed over."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.simulator.program import HOST_WORK, Kind, Program
from spbench.bench.measure.trace import recorder
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import Call, CommunicationMeter, Meter, Operation, as_number
from spbench.bench.measure.trace.operator_results import described, worked_out
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.bench.measure.trace.torch_internals import FakeTensorMode
from spbench.impls.collectives import ring
from spbench.impls.traffic import WIRE_SHARE, Traffic, wire_bytes
from tests.measure.engines.cells import cell, differences, differing_fields, sent_bytes


class Calls(Meter):
    """How often each operator is called, by phase."""

    name = "calls"

    def __init__(self, mesh: object):
        self.counts: Counter[str] = Counter()
        self.current = "setup"

    def phase(self, name: str) -> None:
        self.current = name

    def see(self, call: Call) -> None:
        self.counts[f"{self.current} {call.func._schema.name}"] += 1

    def found(self) -> Mapping[str, Any]:
        return dict(self.counts)


def test_a_further_meter_sees_every_operator_with_its_phase() -> None:
    recorder = Recorder(further=[Calls])
    with recorder:
        x, y = torch.ones(2, 3), torch.ones(3, 4)
        with recorder.phase("forward"):
            torch.mm(x, y).add_(1)
        with recorder.paused():
            torch.zeros(5)
    assert recorder.found() == {
        "calls": {"setup aten::ones": 2, "forward aten::mm": 1, "forward aten::add_": 1}
    }


def test_an_entry_that_fails_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.UntypedStorage.resize_

    def fails(self: TorchDispatchMode) -> None:
        raise RuntimeError("no mode can be entered")

    monkeypatch.setattr(TorchDispatchMode, "__enter__", fails)
    with pytest.raises(RuntimeError, match="no mode"), Recorder():
        pass
    assert torch.UntypedStorage.resize_ is before


def test_what_is_patched_is_put_back() -> None:
    before = torch.UntypedStorage.resize_
    with Recorder():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_an_output_remembered_with_another_shape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell("tensor_parallel")
    with tracing.only_plain_traces():
        expected = tracing.trace(asked, events=True)
    tracing.trace(asked, events=True)
    wrong = dict(recorder.MEMORY)
    for key, remembered in wrong.items():
        if key[0] is torch.ops.aten._softmax.default or "gelu" in key[0]._schema.name:
            new = remembered.results[0]
            larger = dataclasses.replace(new, stride=tuple(2 * s for s in new.stride))
            wrong[key] = dataclasses.replace(remembered, results=(larger, *remembered.results[1:]))
    monkeypatch.setattr(recorder, "MEMORY", wrong)
    assert "sizes" in differences(tracing.trace(asked, events=True), expected)


def test_an_assignment_to_data_is_another_call() -> None:
    """The metadata of an argument is read at each call, not remembered by the tensor's identity."""
    mode = FakeTensorMode()
    recorder = FastRecorder(mode)
    with mode, recorder, recorder.phase("forward"):
        x = torch.ones(4, 4)
        for _ in range(2):
            assert (x + x).shape == (4, 4)
        x.data = torch.ones(2, 3)
        for _ in range(2):
            assert (x + x).shape == (2, 3)


def test_results_are_the_arguments_or_views_of_them_where_they_were() -> None:
    mode = FakeTensorMode()
    recorder = FastRecorder(mode)
    with mode, recorder, recorder.phase("forward"):
        for _ in range(3):
            x, out = torch.ones(4, 6), torch.empty(4, 4)
            assert x.add_(1) is x
            assert torch.mm(x, torch.ones(6, 4), out=out) is out
            view = x[1:, ::2]
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (view.shape, view.stride(), view.storage_offset()) == ((3, 3), (6, 2), 6)
            pieces = x.split(3, dim=1)
            assert [piece.storage_offset() for piece in pieces] == [0, 3]
            assert all(piece.untyped_storage()._cdata == x.untyped_storage()._cdata for piece in pieces)


def operators() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """An operator of each kind that is worked out, with arguments; to be asked for inside a mode."""
    aten, ours = torch.ops.aten, torch.ops.spbench
    q, k = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16), torch.empty(2, 2, 5, 8, dtype=torch.bfloat16)
    x, y = torch.empty(6, 8)[1:, ::2], torch.empty(4, 5)
    yield ours.flash_attention.default, (q, k, k, 0.5, True), {}
    yield aten.transpose.int, (x, 0, 1), {}
    yield aten.split.Tensor, (x, 2, 1), {}
    yield aten.view.default, (torch.empty(6, 8)[2:], [2, 16]), {}
    yield aten.add.Tensor, (x, x.t().clone().t()), {}
    yield aten.mul_.Tensor, (x, 2.0), {}
    yield aten.logaddexp.out, (x, x), {"out": torch.empty(5, 4)}
    yield aten._to_copy.default, (x,), {"dtype": torch.bfloat16}
    yield aten.addmm.default, (torch.empty(5), x, y), {}
    yield aten._log_softmax.default, (x, 1, False), {}


def test_operators_are_worked_out_as_the_mode_does() -> None:
    mode = FakeTensorMode()
    with mode:
        for operator, args, kwargs in operators():
            attributes = {name: value for name, value in vars(torch.empty(0)).items() if name != "fake_mode"}
            found = worked_out(operator, args, kwargs, attributes)
            expected = described(operator, args, kwargs, operator(*args, **kwargs))
            assert found is not None, operator
            assert (found.results, found.container) == (expected.results, expected.container), operator


def test_what_the_mode_knows_better_is_not_worked_out() -> None:
    """Where results lie that are not beside the arguments, layouts that a device chooses, and what is written
    in place by operators of ours."""
    with FakeTensorMode():
        x, image = torch.empty(4, 4), torch.empty(1, 2, 8, 8)
        convolution = (image, torch.empty(2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        for operator, args, kwargs in (
            (torch.ops.spbench.cross_entropy_gradient_.default, (x, x, x), {}),
            (torch.ops.aten.convolution.default, convolution, {}),
            (torch.ops.aten.zeros.default, ([4],), {}),
            (torch.ops.aten.zeros_like.default, (x,), {"device": torch.device("cpu")}),
            (torch.ops.aten.add.Tensor, (x, torch.empty((), device="meta")), {}),
            (torch.ops.aten.lift_fresh.default, (x,), {}),
        ):
            assert worked_out(operator, args, kwargs, {}) is None, operator


@pytest.mark.parametrize("most", [0, 5])
def test_no_more_is_remembered_than_there_may_be(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MEMORY", memory := {})
    monkeypatch.setattr(recorder, "MOST_ENTRIES", most)
    mode = FakeTensorMode()
    with mode, FastRecorder(mode):
        for size in range(1, 10):
            assert torch.ones(size).exp().neg().shape == (size,)
    assert len(memory) == most


class Layers(nn.Module):
    def __init__(self, *, again: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.again = nn.Tanh(), again

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2  # of no layer
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x).sum()


def recorded(*, again: bool) -> MemoryLog:
    with Recorder() as recorder, recorder.step(last=True):
        module = Layers(again=again)
        with recorder.phase("forward"):
            loss = module(torch.ones(3, 8))
        with recorder.phase("backward"):
            loss.backward()
    return recorder.memory.stop()


def made(log: MemoryLog, phase: str) -> list[str]:
    """The places of what is born in a phase, each run of one place once."""
    span = dict(log.spans())[phase]
    places = [log.place_names[log.places[event - 1]] for event in log.events[span] if event > 0]
    return [place for place, before in zip(places, [None, *places], strict=False) if place != before]


def test_forward_and_backward_are_told_by_module() -> None:
    log = recorded(again=False)
    assert len(log.places) == len(log.sizes)
    assert made(log, "forward")[1:] == ["Layers", "layers.*", "head", "Layers"]
    assert made(log, "backward")[:3] == ["", "head", "layers.*"]


def test_what_is_computed_again_is_of_the_same_module() -> None:
    again = recorded(again=True)
    births = [event - 1 for event in again.events[dict(again.spans())["backward"]] if event > 0]
    # a product and its sum with the bias, of each of two layers
    assert sum(again.place_names[again.places[number]] == "layers.*" for number in births) > sum(
        name == "layers.*" for name in made(recorded(again=False), "backward")
    )


@pytest.mark.slow
def test_short_cuts_have_the_places_of_plain_traces() -> None:
    cell = Cell(model="causal-transformer-tiny", strategy="ulysses", sizes={"sp": 2}, batch=4, seq_len=16)
    cell = cell.model_copy(update={"training": cell.training.model_copy(update={"micro_batches": 4})})
    quick = tracing.trace(cell, 0).memory
    with tracing.only_plain_traces():
        plain = tracing.trace(cell, 0).memory
    assert (quick.places, quick.place_names) == (plain.places, plain.place_names)
    assert "blocks.*.mlp" in quick.place_names


def one_step(fast: bool) -> Program:
    """A linear layer and an activation in a module, forward and backward, then a value that is read before an
    update, and modules that are called between steps."""
    with fake_mesh({"dp": 1}, 0) as mesh:
        mode = FakeTensorMode()
        recorder = FastRecorder(mode, mesh, events=True) if fast else Recorder(mesh, events=True)
        with mode, recorder:
            module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
            x = torch.empty(2, 4)
            module(x)  # before the step
            with recorder.phase("forward"):
                y = module(x).sum()
            with recorder.phase("backward"):
                y.backward()
            with recorder.phase("optimizer"):
                torch.cpu.synchronize()
                for parameter in module.parameters():
                    parameter.detach().view(-1).add_(1.0)
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
        return recorder.events.program()


@pytest.fixture(params=[False, True], ids=["plain", "fast"])
def program(request: pytest.FixtureRequest) -> Program:
    one_step(request.param)
    return one_step(request.param)  # with what the first has remembered


def test_work_stands_at_the_event_that_it_comes_before(program: Program) -> None:
    by_name = {
        (program.names[name], phase): dict(zip(HOST_WORK, host, strict=True))
        for event, (name, host) in enumerate(zip(program.name, program.host.tolist(), strict=True))
        if (phase := program.phase_of(event))
    }
    # the outer module and the linear one, with a transposed weight; then the activation's module
    assert by_name["addmm", "forward"] == {"views": 1, "nodes": 0, "modules": 2, "joins": 0, "checks": 0}
    assert by_name["gelu", "forward"] == {"views": 0, "nodes": 0, "modules": 1, "joins": 0, "checks": 0}
    assert by_name["sum", "forward"] == {"views": 0, "nodes": 0, "modules": 0, "joins": 0, "checks": 0}
    # of the sum, which expands its gradient, and of the activation
    assert by_name["gelu_backward", "backward"] == {
        "views": 1,
        "nodes": 2,
        "modules": 0,
        "joins": 0,
        "checks": 0,
    }
    assert by_name["mm", "backward"]["nodes"] == 1
    assert program.host[:, HOST_WORK.index("modules")].sum() == 3


def test_the_host_waits_once_before_the_update(program: Program) -> None:
    joins = program.host[:, HOST_WORK.index("joins")]
    assert joins.sum() == 1
    (event,) = joins.nonzero()[0]
    assert (program.names[program.name[event]], program.phase_of(int(event))) == ("add_", "optimizer")


def test_both_paths_count_alike() -> None:
    assert differing_fields(one_step(fast=True), one_step(fast=False)) == []


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
    kinds = [kind for kind in program.kind.tolist() if kind in (Kind.COLLECTIVE, Kind.WAIT)]
    assert kinds == [Kind.COLLECTIVE, Kind.WAIT]
    posted, waited = (int(np.flatnonzero(program.kind == kind)[0]) for kind in (Kind.COLLECTIVE, Kind.WAIT))
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
    totals = sent_bytes(recorder.communication)
    assert totals["forward", "all_reduce"] == 480 + 640
    assert totals["gradient_sync", "all_reduce"] == 384 + 704


def test_bytes_that_do_not_divide_are_exact() -> None:
    with fake_mesh({"sp": 3}, 0) as mesh:
        meter = metered(mesh, lambda: [dist.all_reduce(torch.zeros(1)) for _ in range(3)])
    assert sent_bytes(meter) == {("forward", "all_reduce"): Fraction(16)}  # thrice 4 * 4/3
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
