"""Workspaces of libraries: one for each library and thread, of the size that the cluster or the cell says."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.rank_memory import RankMemory, allocator_of
from spbench.bench.measure.engines.traces import trace_key
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.recorder import FastRecorder
from spbench.impls.kernels.projection import accumulate_mm_, te_accumulate_mm_, te_mm
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.strategies.base import Unsupported

MIB = 2**20
A100 = {"cublas": 8 * MIB + MIB // 8, "transformer_engine": 4 * MIB}


def cell_of(**changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "bert-tiny",
        "strategy": "single",
        "batch": 2,
        "seq_len": 32,
        "precision": "fp16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


def made_in(log: MemoryLog) -> list[tuple[str, str]]:
    """Each workspace and the phase in which it is made, in order."""
    births = {number: log.events.index(number + 1) for number in log.workspaces}
    return [(log.workspaces[number], log.phase_of(at)) for number, at in births.items()]


def test_cublas_has_one_for_each_thread_of_a_step() -> None:
    log = tracing.trace(cell_of(training={"steps": 2})).memory
    assert made_in(log) == [("cublas", "forward"), ("cublas", "backward")]
    assert [log.sizes[number] for number in log.workspaces] == [A100["cublas"]] * 2
    again = tracing.trace(cell_of(model_options={"checkpointing": True})).memory
    assert made_in(again) == made_in(log)  # what is computed again is in autograd's thread
    assert made_in(tracing.trace(cell_of(training={"step": "inference"})).memory) == [("cublas", "forward")]


def test_a_row_has_them_on_a_cluster_that_says_how_large_they_are() -> None:
    without = VirtualEngine().measure(cell_of(cluster="piz-daint-p100"))
    found = VirtualEngine().measure(cell_of())
    assert without.peak_held["workspaces"] == 0
    assert found.peak_held["workspaces"] == 2 * A100["cublas"]
    assert found.peak_memory_bytes == pytest.approx(without.peak_memory_bytes + 2 * A100["cublas"], rel=1e-2)
    (at_end,) = (row["allocated_bytes"] for row in found.by_class if row["step"])
    assert at_end > 2 * A100["cublas"]  # for ever
    assert found.communication == without.communication


def test_a_cell_can_set_cublas_workspaces() -> None:
    deterministic = cell_of(training={"cublas_workspace": ":4096:8"})
    log = tracing.trace(deterministic).memory
    assert [log.sizes[number] for number in log.workspaces] == [32 * MIB] * 2
    several = cell_of(training={"cublas_workspace": ":4096:2:16:8"}, cluster="piz-daint-p100")
    assert VirtualEngine().measure(several).peak_held["workspaces"] == 2 * A100["cublas"]
    assert trace_key(deterministic, 0, True) == trace_key(cell_of(), 0, True)
    assert deterministic.key != cell_of().key


def test_a_cell_can_have_expandable_segments() -> None:
    expandable = cell_of(training={"cuda_alloc_conf": "expandable_segments:True"})
    log = MemoryLog(sizes=[25 * MIB], events=[1, -1], marks=[("forward", 0)])
    reserved = [RankMemory.of(log, None, allocator_of(c)).reserved_on_card for c in (cell_of(), expandable)]
    assert reserved == [26 * MIB, 40 * MIB]  # a segment of its own, or two pages
    # what is given out is what was asked for, in whole granules
    traced = tracing.trace(expandable)
    assert traced.measurement(None).peak_memory_bytes == traced.memory.peak().nbytes
    assert trace_key(expandable, 0, True) == trace_key(cell_of(), 0, True)
    assert expandable.key != cell_of().key
    assert cell_of(training={"cuda_alloc_conf": "expandable_segments:False"}).key == cell_of().key


@pytest.mark.parametrize("config", [None, "expandable_segments:True", "max_split_size_mb:128"])
def test_a_card_on_which_cached_memory_must_be_given_back_can_count_as_full(config: str | None) -> None:
    cells = [cell_of(training={"cuda_alloc_conf": config, "alloc_retries": may}) for may in (True, False)]
    # of 80 MiB 40 are free again and 20 in use; 60 are asked for
    log = MemoryLog(sizes=[40 * MIB, 20 * MIB, 60 * MIB], events=[1, 2, -1, 3], marks=[("forward", 0)])
    may, may_not = (RankMemory.of(log, 80 * MIB, allocator_of(cell)) for cell in cells)
    assert may_not.failure.error.reserved >= 60 * MIB
    reason = may_not.failure.reason(plan(cells[1]).class_of(0))
    assert "without a retry of the allocator" in reason
    assert may.failure is None
    assert trace_key(cells[0], 0, True) == trace_key(cells[1], 0, True)
    assert cells[0].key != cells[1].key


def test_the_buffer_of_gradients_is_held_throughout() -> None:
    sharded = {"backend": "zero3"}
    buffered = cell_of(training={**sharded, "gradient_buffer_kib": 2048})
    logs = [tracing.trace(cell).memory for cell in (cell_of(training=sharded), buffered)]
    assert logs[1].peak().nbytes - logs[0].peak().nbytes == 2 * MIB
    (number,) = {*logs[1].sizes} - {*logs[0].sizes}
    assert logs[1].events.index(-logs[1].sizes.index(number) - 1) >= logs[1].step_ends[-1]


def test_other_settings_of_the_allocator_are_refused() -> None:
    with pytest.raises(ValueError, match="max_split_size_mb:N are modelled, not 'backend:cudaMallocAsync'"):
        TrainingOptions(cuda_alloc_conf="backend:cudaMallocAsync")
    with pytest.raises(ValueError, match="torch has max_split_size_mb of more than 20, not"):
        TrainingOptions(cuda_alloc_conf="max_split_size_mb:20")


def test_a_cell_can_have_blocks_that_are_not_split() -> None:
    asked = cell_of(training={"cuda_alloc_conf": "max_split_size_mb:128"})
    assert allocator_of(asked).split_limit == 128 * MIB
    assert trace_key(asked, 0, True) == trace_key(cell_of(), 0, True)
    assert asked.key != cell_of().key


@pytest.mark.parametrize("config", ["", "4096:8", ":4096", ":4096:8:", ":4 MiB:8", ":-1:8"])
def test_a_workspace_that_torch_would_not_read_is_refused(config: str) -> None:
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG: write pairs :KIB:COUNT"):
        TrainingOptions(cublas_workspace=config)


@pytest.mark.parametrize(
    ("training", "variable"),
    [
        ({"cublas_workspace": ":4096:8"}, "CUBLAS_WORKSPACE_CONFIG"),
        ({"cuda_alloc_conf": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_real_ranks_read_it_from_their_environment(training: dict[str, str], variable: str) -> None:
    asked = cell_of(training=training, engine="distributed")
    with pytest.raises(Unsupported, match=f"set {variable} in the environment"):
        DistributedEngine().measure(asked)


class Mixed(torch.autograd.Function):
    """x times w by TransformerEngine, both gradients too; that of w is added to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, into: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, into)
        return te_mm(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, w, into = ctx.saved_tensors
        te_accumulate_mm_(into, x.mT, grad)
        return te_mm(grad, w.mT), None, None


def recorded(program: Any) -> MemoryLog:
    mode = FakeTensorMode()
    recorder = FastRecorder(mode)
    with mode, recorder:
        program(recorder)
    return recorder.memory.stop()


def test_transformer_engine_has_one_in_all_and_none_of_torchs() -> None:
    def program(recorder: FastRecorder) -> None:
        x, w, into = torch.empty(4, 4, requires_grad=True), torch.empty(4, 4), torch.empty(4, 4)
        for _ in range(2):
            with recorder.phase("forward"):
                y = checkpoint(Mixed.apply, x, w, into, use_reentrant=False)
            with recorder.phase("backward"):
                y.sum().backward()
        with recorder.phase("optimizer"):
            accumulate_mm_(into, x.detach(), w)

    log = recorded(program)
    assert made_in(log) == [("transformer_engine", "forward"), ("cublas", "optimizer")]
    sized = log.with_workspaces({"transformer_engine": 4 * MIB})
    assert [sized.sizes[number] for number in log.workspaces] == [4 * MIB, 0]
    assert sized.peaks(sized.sizes)[-1].held["workspaces"] == 4 * MIB


def test_the_first_product_in_a_ring_leaves_its_steps_alike() -> None:
    run = []

    def program(recorder: FastRecorder) -> None:
        x = torch.empty(8, 8)
        with recorder.phase("forward"), torch.no_grad():
            for step in keyed_steps(64, lambda step: "all"):
                run.append(step)
                del step
                torch.mm(x, x)

    log = recorded(program)
    assert len(run) < 10
    assert log.sizes.count(256) == 1 + 64
    assert made_in(log) == [("cublas", "forward")]


@pytest.mark.parametrize("name", ["dgx-a100", "a100-lasp"])
def test_figures_of_ampere(name: str) -> None:
    figures = load_cluster(name).device.workspaces
    assert {library: figure.value for library, figure in figures.items()} == A100


def test_the_default_is_no_workspace_of_its_own() -> None:
    assert TrainingOptions().cublas_workspace is None
    assert load_cluster("piz-daint-p100").device.workspaces == {}
