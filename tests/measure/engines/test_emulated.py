"""One rank of N on this machine's CPU: what it holds, sends and computes is what virtual ranks say. What a
rank receives from ranks that are not there."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import emulated, search, tracing, virtual
from spbench.bench.measure.engines.emulated import BACKEND, EmulatedEngine, EmulatedGroup, memory_fraction
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.search import largest_fitting
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Measurement
from spbench.impls.layout import Unavailable
from spbench.impls.registries import all_backends, all_models, all_strategies
from spbench.impls.strategies.nesting import nesting
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.measure.engines.cells import supported
from tests.slow import mostly_slow

TINY = [name for name in all_models() if "-tiny" in name]
RING = make_cell(
    "bert-tiny",
    "ring_self_attention",
    {"sp": 4},
    3,
    24,
    "fp32",
    engine="emulated",
    timing={"warmup": 0, "samples": 2},
)


def cell_of(strategy: str, model: str, **changes: Any) -> Cell | None:
    """Four ranks along each axis of a strategy; None where it cannot run the model."""
    sizes = dict.fromkeys(nesting(strategy).axes, 4)
    content = {"model": model, "strategy": strategy, "sizes": sizes, "batch": 2, "seq_len": 24} | changes
    cell = Cell.model_validate(content)
    return cell if supported(cell) else None


def played(cell: Cell, rank: int) -> tuple[Trace, list[float]]:
    """The trace of a rank with real values, and the losses of its next two steps."""
    with fake_mesh(cell.mesh_sizes, rank, backend=BACKEND) as mesh:
        recorder, training, inputs = emulated._metered(cell, mesh, events=True)
        trace = Trace.of(cell, rank, recorder)
        return trace, [float(training.step(inputs)) for _ in range(2)]


def differences(ours: Trace, theirs: Trace) -> list[str]:
    """What is not the same: closed forms, bytes, operators in their order, and each birth and death."""
    found = ["communication"] * (ours.communication.counts != theirs.communication.counts)
    found += ["operators"] * (_operators(ours) != _operators(theirs))
    found += ["memory"] * (not np.array_equal(_in_step(ours.memory), _in_step(theirs.memory)))
    return found + ["peak"] * (ours.memory.peak() != theirs.memory.peak())


def _operators(trace: Trace) -> list[tuple[str, float, float]]:
    program = trace.program
    names = [program.names[number] for number in program.name]
    return list(zip(names, program.flops.tolist(), program.nbytes.tolist(), strict=True))


def _in_step(log: MemoryLog) -> np.ndarray:
    """Live bytes at the beginning of the step, and the change at each event until its last birth; after that
    fake and real tensors die as their tests end."""
    change = log.signed_bytes()
    last = int(np.flatnonzero(change > 0)[-1])
    return np.concatenate([[change[: log.step_start].sum()], change[log.step_start : last + 1]])


def compared(cell: Cell) -> list[str]:
    """What is not as on virtual ranks, on the first rank of each class."""
    problems = []
    for each in rank_classes(cell):
        trace, losses = played(cell, each.first)
        problems += differences(trace, tracing.trace(cell, each.first, events=True))
        problems += ["losses"] * (not all(map(math.isfinite, losses)))
    return problems


#: real ranks of all strategies are compared in :mod:`tests.measure.engines.test_peaks`
@pytest.mark.parametrize("strategy", mostly_slow(all_strategies(), "single", "dsp", "lasp", "ring_attention"))
def test_one_rank_is_as_the_virtual_one(strategy: str) -> None:
    # which tokens experts get, and what that takes, depends on values, which fake ranks do not have
    cells = (cell_of(strategy, model) for model in TINY if not model.startswith("moe"))
    cell = next(cell for cell in cells if cell is not None)
    assert compared(cell) == []


#: models whose backward calls elu_backward, the fake one of which has other strides than the real one: after
#: that some gradients are cloned that fake ones are not; bytes sent and peaks are the same
ELU_MODELS = {"linear-transformer-tiny"}


def test_torch_lays_a_fake_gradient_of_elu_out_as_its_input() -> None:
    """Where it does no more, nothing need be excepted below."""
    x, gradient = torch.empty(2, 24, 12, 4).transpose(1, 2), torch.empty(2, 12, 24, 4)

    def strides(x: Tensor, gradient: Tensor) -> tuple[int, ...]:
        return torch.ops.aten.elu_backward(gradient, 1.0, 1.0, 1.0, False, x).stride()

    with FakeTensorMode() as mode:
        fake = strides(mode.from_tensor(x), mode.from_tensor(gradient))
    assert (strides(x, gradient), fake) == (gradient.stride(), x.stride())


@pytest.mark.slow
@pytest.mark.parametrize("backend", all_backends())
@pytest.mark.parametrize("strategy", [*all_strategies(), "tensor_parallel+ring_attention", "ulysses+lasp"])
def test_every_model_and_backend(strategy: str, backend: str) -> None:
    problems, count = {}, 0
    for model in TINY:
        sizes = {**dict.fromkeys(nesting(strategy).axes, 2), "dp": 2}
        cell = cell_of(strategy, model, sizes=sizes, precision="fp16", training={"backend": backend})
        if cell is not None:
            count += 1
            found = compared(cell)
            if model in ELU_MODELS:
                found = [what for what in found if what not in ("operators", "memory")]
            problems[model] = found
    assert count
    assert {model: found for model, found in problems.items() if found} == {}


@contextmanager
def in_this_process(cell: Cell) -> Iterator[Callable[..., Measurement]]:
    yield emulated.played


def test_a_loss_that_is_not_finite_is_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def recv(self: EmulatedGroup, tensors: list[Tensor], *rest: Any) -> dist.Work:
        work = dist.ProcessGroup.recv(self, tensors, *rest)
        for x in tensors:
            x.detach().fill_(math.nan)
        return work

    assert emulated.played(RING, 0, timed=False).status == "ok"
    monkeypatch.setattr(EmulatedGroup, "recv", recv)
    assert emulated.played(RING, 0, timed=False).status == "numerics"


def test_the_cap_is_the_part_that_the_card_has_of_this_gpu() -> None:
    assert memory_fraction(16 * 2**30, 80 * 2**30) == 0.2
    assert memory_fraction(None, 80 * 2**30) == 1.0
    assert memory_fraction(81559 * 2**20, 84_929_150_976) == 1.0, "an H100 by nvidia-smi, and by CUDA"
    with pytest.raises(Unavailable, match=r"card has 80.0 GiB for tensors, and this GPU 16.0 GiB"):
        memory_fraction(80 * 2**30, 16 * 2**30)


def test_a_gpu_that_is_full_is_a_status_and_has_the_cap_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there, of which each call is noted."""
    calls: list[Any] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)

    def full(cell: Cell, rank: int, timed: bool) -> Measurement:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(emulated, "played", full)
    mesh: Any = SimpleNamespace(device_type="cuda")
    found = emulated._played_alone(mesh, RING, 2, True, 0.2)
    assert calls == ["left", "emptied", 0.2]
    assert (found.status, found.peak_rank) == ("oom", 2)
    assert found.reason == "CUDA out of memory. Tried to allocate 2.00 GiB."


# torch's fully_shard goes on with the streams of the metered step
@pytest.mark.parametrize("backend", ["ddp", "zero3"])
def test_measures_in_a_process_of_its_own(backend: str) -> None:
    cell = Cell.model_validate(
        RING.model_dump() | {"cluster": "piz-daint-p100", "training": {"backend": backend}}
    )
    found, virtually = EmulatedEngine().measure(cell), VirtualEngine().measure(cell)
    assert (found.status, found.peak_rank) == ("ok", virtually.peak_rank)
    assert found.peak_memory_bytes == virtually.peak_memory_bytes
    assert found.communication == virtually.communication
    assert len(found.step_time_samples_s) == 2
    assert found.breakdown["exposed_communication_s"] > 0
    assert found.step_time_s == pytest.approx(sum(found.breakdown.values()), rel=1e-12)


def test_plays_the_rank_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a pipeline, which holds other layers than the rank with the largest peak."""
    monkeypatch.setattr(emulated, "_player", in_this_process)
    sizes, training = {"pp": 2}, {"micro_batches": 3}
    pipeline = Cell.model_validate(
        RING.model_dump() | {"strategy": "single", "sizes": sizes, "training": training, "batch": 6}
    )
    found = {rank: EmulatedEngine().measure(pipeline.model_copy(update={"rank": rank})) for rank in (None, 1)}
    assert found[None].peak_rank == virtual.trace_classes(pipeline).worst().rank == 0
    assert found[1].peak_rank == 1
    assert found[1].peak_memory_bytes == tracing.trace(pipeline, 1).memory.peak().nbytes


CARD = data(__file__)["CARD"]


def searching(tmp_path: Path) -> Cell:
    card = tmp_path / "small-card.yaml"
    card.write_text(CARD)
    changes = {"cluster": str(card), "seq_len": None, "search": {"quantity": "seq_len", "step": 4}}
    return Cell.model_validate(RING.model_dump(exclude={"seq_len"}) | changes)


def tried(found: Measurement) -> list[tuple[int, str]]:
    return [(probe["value"], probe["status"]) for probe in found.proof]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("guess", [None, 64])
def test_a_search_is_decided_by_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guess: int | None
) -> None:
    """Whatever the virtual engine has guessed."""
    monkeypatch.setattr(emulated, "_player", in_this_process)
    monkeypatch.setattr(search, "largest_that_fits", lambda cell: Measurement(answer=guess, peak_rank=0))
    cell = searching(tmp_path)
    found = search.search(cell, EmulatedEngine())
    assert {(found.answer, "ok"), (found.answer + 16, "oom")} <= set(tried(found))
    expected = tracing.trace(cell.at(found.answer)).memory.peak().nbytes
    assert (found.status, found.peak_memory_bytes) == ("ok", expected)


@pytest.mark.slow
def test_a_search_begins_with_the_virtual_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(emulated, "_player", in_this_process)
    found, virtually = (
        search.search(searching(tmp_path), engine()) for engine in (EmulatedEngine, VirtualEngine)
    )
    assert found.answer == virtually.answer
    assert tried(found) == [(virtually.answer, "ok"), (virtually.answer + 16, "oom")]


@given(count=st.integers(1, 300), data=st.data())
def test_the_largest_number_is_found_from_any_guess(count: int, data: st.DataObject) -> None:
    largest, guess = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= largest

    assert largest_fitting(count, fits, guess) == largest
    assert len(set(tried)) == len(tried)
    if guess == largest:
        assert len(tried) <= 2
    assert len(tried) <= 2 * math.log2(count + 1) + 3


@tabled(__file__, "a_row_says_what_a_gpu_ran_in_plain_torch")
def test_a_row_says_what_a_gpu_ran_in_plain_torch(model: str, device: str, operator: str) -> None:
    cell = make_cell(model, "single", {}, 1, 24, "fp32")
    line = emulated.in_plain_torch(virtual.trace_classes(cell, events=True).worst().program, device)
    assert operator in line
    assert bool(line) == bool(operator)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


#: of torch.distributed, by name: called with this rank's part [4, 3] and a poisoned whole [16, 3]
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_gather": lambda part, whole: dist.all_gather(list(whole.chunk(4)), part),
    "all_gather_into_tensor": lambda part, whole: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda part, whole: dist.reduce_scatter(whole[:1], list(part.chunk(4))),
    "reduce_scatter_tensor": lambda part, whole: dist.reduce_scatter_tensor(whole[:1], part),
    "all_to_all": lambda part, whole: dist.all_to_all(list(whole[:4].chunk(4)), list(part.chunk(4))),
    "all_to_all_single": lambda part, whole: dist.all_to_all_single(whole[:4], part),
    "uneven all_to_all_single": lambda part, whole: dist.all_to_all_single(
        whole[:7], part, [1, 2, 2, 2], [1, 1, 1, 1]
    ),
    "recv": lambda part, whole: dist.recv(whole[:2], 2),
    "irecv": lambda part, whole: dist.irecv(whole[:2], 2).wait(),  # type: ignore[union-attr]
}


WRITTEN = data(__file__)["WRITTEN"]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_received_is_finite(collective: str) -> None:
    whole = poisoned(16, 3)
    with fake_mesh({"sp": 4}, 1, backend=BACKEND):
        COLLECTIVES[collective](torch.randn(4, 3), whole)
    assert whole[: WRITTEN[collective]].isfinite().all()
    assert whole[WRITTEN[collective] :].isnan().all()


def test_a_part_in_its_place_is_gathered_where_it_is() -> None:
    """As fully_shard does, whose part lies in the whole."""
    whole = poisoned(4, 3)
    whole[1] = torch.arange(3.0)
    with fake_mesh({"sp": 4}, 1, backend=BACKEND):
        dist.all_gather_into_tensor(whole, whole[1:2])
    assert (whole == torch.arange(3.0)).all()
