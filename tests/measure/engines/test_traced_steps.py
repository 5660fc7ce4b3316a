"""Memory in an allocator's blocks, for each class of ranks and at each of several traced steps.
Workspaces of libraries: one for each library and thread, of the size that the cluster or the cell says.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines import distributed, tracing
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import RankClass, plan
from spbench.bench.measure.engines.rank_memory import RankMemory, allocator_of, needs
from spbench.bench.measure.engines.traces import trace_key
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog, Peak
from spbench.bench.measure.trace.recorder import FastRecorder
from spbench.impls.composition import Stage
from spbench.impls.kernels.projection import accumulate_mm_, te_accumulate_mm_, te_mm
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.strategies.base import Unsupported
from tests.cells import make_cell
from tests.grid import tabled
from tests.measure.engines.cells import differing_fields, write_cluster

MIB = 2**20


def cell_of(steps: int = 1, **changes: Any) -> Cell:
    training = {"steps": steps, **changes.pop("training", {})}
    fields = {"cluster": "piz-daint-p100", **changes, "training": training}
    return make_cell("bert-tiny", "single", {}, 4, 128, "fp16", **fields)


#: two steps after a set-up that makes and frees 100 MiB: weights of 49.25 MiB in a segment of 50 stay (-2 is
#: the 100 MiB's death). Step 1 makes 3 MiB, which take 3 of a freed block of 100, and 8 MiB that stay: 61 in
#: all. Step 2 makes 30 MiB: 50 + 8 + 30
LOG = MemoryLog(
    sizes=[197 * MIB // 4, 100 * MIB, 3 * MIB, 8 * MIB, 30 * MIB],
    events=[1, 2, -2, 3, 4, -3, 5, -5, -1, -4],
    marks=[("forward", 3), ("optimizer", 4), ("forward", 6), ("backward", 7)],
    tags={0: "parameters", 3: "optimizer_state"},
    ends=[6, 8],
)
ALONE = RankClass(Stage(), {}, (0,))


def test_memory_of_two_steps_by_hand() -> None:
    found = RankMemory.of(LOG, capacity=None)
    assert [peak.nbytes for peak in found.peaks] == [61 * MIB, 88 * MIB]
    assert [peak.phase for peak in found.peaks] == ["optimizer", "forward"]
    assert [peak.at_end for peak in found.peaks] == [58 * MIB, 58 * MIB]
    assert found.peak.held["parameters"] == 50 * MIB  # the slack of a block is of what its tensor is
    assert found.peak.held["optimizer_state"] == 8 * MIB
    assert list(found.reserved) == [150 * MIB, 150 * MIB, 150 * MIB]
    assert (found.setup.nbytes, found.setup.phase, found.setup.at_end) == (150 * MIB, "set-up", 50 * MIB)
    assert found.failure is None
    setup, first, second = found.rows(ALONE)
    assert (setup["step"], setup["peak_phase"], setup["reserved_memory_bytes"]) == (0, "set-up", 150 * MIB)
    assert first["peak_held"] == {"parameters": 50 * MIB, "optimizer_state": 8 * MIB, "activations": 3 * MIB}
    assert (second["step"], second["status"], second["allocated_bytes"]) == (2, "ok", 58 * MIB)


def test_memory_where_phases_end_by_hand() -> None:
    """Blocks that are given out then, and what is reserved up to then; of phases of one name, the last."""
    events = [1, 2, -2, 3, 4, -3, 6, 5, -5, -1, -4]  # a third phase of step 1 makes 80 MiB more
    marks = [("forward", 3), ("optimizer", 4), ("forward", 6), ("forward", 7), ("backward", 8)]
    sizes = [*LOG.sizes, 80 * MIB]
    found = RankMemory.of(MemoryLog(sizes, events, marks, LOG.tags, ends=[7, 9]), capacity=None)
    first = {"forward": (138, 150), "optimizer": (58, 150)}
    second = {"forward": (168, 180), "backward": (138, 180)}
    wanted = [{}, first, second]
    assert [row["phase_ends"] for row in found.rows(ALONE)] == [
        {name: {"allocated": a * MIB, "reserved": r * MIB} for name, (a, r) in of_step.items()}
        for of_step in wanted
    ]


def test_the_step_that_does_not_fit_is_named_and_says_what_it_would_take() -> None:
    # set-up has to give back its 100 MiB for the segment of 20 MiB, of which step 1 takes 11; then there is
    # no room for one of 30
    sizes, events = [*LOG.sizes], [1, 3, 4, -3, 5, -5, -1, -4]
    marks = [("forward", 1), ("optimizer", 2), ("forward", 4), ("backward", 5)]
    log = MemoryLog(sizes, events, marks, LOG.tags, ends=[4, 6])
    found = RankMemory.of(log, capacity=99 * MIB)
    assert (found.failure.step, found.failure.phase) == (2, "forward")
    likes = RankClass(Stage(1, 2), {}, (4, 5, 6))
    assert found.failure.reason(likes) == (
        "no room for 30 MiB with 58 MiB allocated and 70 MiB reserved, in forward of step 2 on rank 4, "
        "one of 3 alike (stage 1)"
    )
    assert [row["status"] for row in found.rows(likes)] == ["ok", "ok", "oom"]
    assert (found.peak.nbytes, found.reserved[-1], found.reserved_on_card) == (88 * MIB, 100 * MIB, 70 * MIB)
    within = RankMemory.of(MemoryLog([60 * MIB, 1], [1, 2], [("forward", 1)]), capacity=50 * MIB)
    assert "in set-up on rank 0" in within.failure.reason(ALONE)
    assert not within.failure.steps_fit
    assert [row["status"] for row in within.rows(ALONE)] == ["oom", "oom"]


def test_a_setup_that_alone_does_not_fit_is_told_so() -> None:
    found = RankMemory.of(LOG, capacity=120 * MIB)
    assert (found.failure.step, found.failure.steps_fit) == (0, True)
    assert [row["status"] for row in found.rows(ALONE)] == ["oom", "ok", "ok"]
    told = "the steps fit at 0.1 GiB, set-up does not: 0.1 GiB"
    assert needs(found, cell_of(1)).startswith(f"{told}; initialise on the meta")
    assert needs(found, cell_of(1, strategy="single", sizes={"pp": 2})) == told


@tabled(__file__, "what_a_step_that_does_not_fit_needs_can_be_had")
def test_what_a_step_that_does_not_fit_needs_can_be_had(
    category: str, sizes: dict[str, int], backend: str, advice: str
) -> None:
    peak = Peak(2**31, "forward", {"parameters": 2**29, category: 3 * 2**29}, 0)
    asked = cell_of(1, strategy="single", sizes=sizes, training={"backend": backend})
    told = needs(RankMemory(peak, [peak], [], [], 0, None), asked)
    assert told.startswith("the step needs 2.0 GiB at its peak" + advice)
    if "the backend " in told:
        better = told.partition("the backend ")[2].split()[0]
        plan(asked.model_copy(update={"training": asked.training.model_copy(update={"backend": better})}))


def test_a_later_step_has_the_moments_that_the_first_one_makes() -> None:
    lazy, kept = (
        tracing.trace(cell_of(steps, precision="bf16", training={"moments": moments}), events=True)
        for steps, moments in ((2, "later"), (1, "kept"))
    )
    first, second = lazy.memory.levels(lazy.memory.sizes).steps
    (steady,) = kept.memory.levels(kept.memory.sizes).steps
    moments = steady.held["optimizer_state"] - first.held["optimizer_state"]
    parameters = steady.held["parameters"] // 2
    assert moments == pytest.approx(2 * 4 * parameters, rel=1e-3)  # two of float32, and a count each
    assert second == steady
    assert first.at_end == steady.at_end
    # what the last step does and sends is what a step with moments does: the making of them is not in it
    assert differing_fields(lazy.program, kept.program) == []
    assert lazy.communication.counts == kept.communication.counts


def test_rows_of_each_class_and_step_and_the_largest_of_them() -> None:
    asked = cell_of(
        2, strategy="ring_self_attention", sizes={"pp": 2, "sp": 2}, training={"moments": "later"}
    )
    found = VirtualEngine().measure(asked)
    assert found.status == "ok"
    table = found.by_class
    assert [(row["rank"], row["ranks"], row["stage"], row["step"]) for row in table] == [
        (0, 2, 0, 0),
        (0, 2, 0, 1),
        (0, 2, 0, 2),
        (2, 2, 1, 0),
        (2, 2, 1, 1),
        (2, 2, 1, 2),
    ]
    assert found.peak_memory_bytes == max(row["peak_memory_bytes"] for row in table)
    assert found.reserved_memory_bytes in [row["reserved_memory_bytes"] for row in table]
    for row in table:
        assert sum(row["peak_held"].values()) == row["peak_memory_bytes"] <= row["reserved_memory_bytes"]
        assert 0 not in row["peak_held"].values()
        assert row["allocated_bytes"] <= row["peak_memory_bytes"]
    once = VirtualEngine().measure(asked.model_copy(update={"training": cell_of(1).training}))
    assert (once.communication, once.formula_difference) == (found.communication, [])
    assert [row["step"] for row in once.by_class] == [0, 1, 0, 1]


def test_a_step_that_runs_out_is_named_by_its_class(tmp_path: Path) -> None:
    # the first step's peak is at the loss, before the moments are made
    shape = {"model": "bert-base", "model_options": {"layers": 1}, "batch": 32}
    asked = cell_of(2, **shape, training={"moments": "later"})
    _, first, second = VirtualEngine().measure(asked).by_class
    assert first["reserved_memory_bytes"] < second["peak_memory_bytes"]
    enough_once = write_cluster(tmp_path, first["reserved_memory_bytes"] // MIB)
    fails = VirtualEngine().measure(asked.model_copy(update={"cluster": enough_once}))
    assert fails.status == "oom"
    assert "of step 2 on rank 0; the step needs 1.3 GiB at its peak" in fails.reason
    assert [row["status"] for row in fails.by_class] == ["ok", "ok", "oom"]
    assert fails.by_class[2]["peak_memory_bytes"] == second["peak_memory_bytes"]


def test_real_ranks_trace_as_many_steps(pool: RankPool) -> None:
    asked = cell_of(
        2, precision="fp32", strategy="tensor_parallel", sizes={"tp": 2}, training={"moments": "later"}
    )
    virtually = VirtualEngine().measure(asked)
    (first, _) = pool.run({"tp": 2}, distributed.measure_rank, asked, timeout_s=120)
    assert first.communication == virtually.communication
    assert [row["step"] for row in first.by_class] == [0, 1, 2]
    assert first.setup_peak_memory_bytes == virtually.setup_peak_memory_bytes
    lasting = [row["allocated_bytes"] for row in virtually.by_class]
    assert [row["allocated_bytes"] for row in first.by_class] == lasting


A100 = {"cublas": 8 * MIB + MIB // 8, "transformer_engine": 4 * MIB}


on_a100 = partial(make_cell, "bert-tiny", "single", {}, 2, 32, "fp16", cluster="dgx-a100")


def made_in(log: MemoryLog) -> list[tuple[str, str]]:
    """Each workspace and the phase in which it is made, in order."""
    births = {number: log.events.index(number + 1) for number in log.workspaces}
    return [(log.workspaces[number], log.phase_of(at)) for number, at in births.items()]


def test_cublas_has_one_for_each_thread_of_a_step() -> None:
    log = tracing.trace(on_a100(training={"steps": 2})).memory
    assert made_in(log) == [("cublas", "forward"), ("cublas", "backward")]
    assert [log.sizes[number] for number in log.workspaces] == [A100["cublas"]] * 2
    again = tracing.trace(on_a100(model_options={"checkpointing": True})).memory
    assert made_in(again) == made_in(log)  # what is computed again is in autograd's thread
    assert made_in(tracing.trace(on_a100(training={"step": "inference"})).memory) == [("cublas", "forward")]


def test_a_row_has_them_on_a_cluster_that_says_how_large_they_are() -> None:
    without = VirtualEngine().measure(on_a100(cluster="piz-daint-p100"))
    found = VirtualEngine().measure(on_a100())
    assert without.peak_held["workspaces"] == 0
    assert found.peak_held["workspaces"] == 2 * A100["cublas"]
    assert found.peak_memory_bytes == pytest.approx(without.peak_memory_bytes + 2 * A100["cublas"], rel=1e-2)
    (at_end,) = (row["allocated_bytes"] for row in found.by_class if row["step"])
    assert at_end > 2 * A100["cublas"]  # for ever
    assert found.communication == without.communication


def test_a_cell_can_set_cublas_workspaces() -> None:
    deterministic = on_a100(training={"cublas_workspace": ":4096:8"})
    log = tracing.trace(deterministic).memory
    assert [log.sizes[number] for number in log.workspaces] == [32 * MIB] * 2
    several = on_a100(training={"cublas_workspace": ":4096:2:16:8"}, cluster="piz-daint-p100")
    assert VirtualEngine().measure(several).peak_held["workspaces"] == 2 * A100["cublas"]
    assert trace_key(deterministic, 0, True) == trace_key(on_a100(), 0, True)
    assert deterministic.key != on_a100().key


def test_a_cell_can_have_expandable_segments() -> None:
    expandable = on_a100(training={"cuda_alloc_conf": "expandable_segments:True"})
    log = MemoryLog(sizes=[25 * MIB], events=[1, -1], marks=[("forward", 0)])
    reserved = [RankMemory.of(log, None, allocator_of(c)).reserved_on_card for c in (on_a100(), expandable)]
    assert reserved == [26 * MIB, 40 * MIB]  # a segment of its own, or two pages
    # what is given out is what was asked for, in whole granules
    traced = tracing.trace(expandable)
    assert traced.measurement(None).peak_memory_bytes == traced.memory.peak().nbytes
    assert trace_key(expandable, 0, True) == trace_key(on_a100(), 0, True)
    assert expandable.key != on_a100().key
    assert on_a100(training={"cuda_alloc_conf": "expandable_segments:False"}).key == on_a100().key


@pytest.mark.parametrize("config", [None, "expandable_segments:True", "max_split_size_mb:128"])
def test_a_card_on_which_cached_memory_must_be_given_back_can_count_as_full(config: str | None) -> None:
    cells = [on_a100(training={"cuda_alloc_conf": config, "alloc_retries": may}) for may in (True, False)]
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
    buffered = on_a100(training={**sharded, "gradient_buffer_kib": 2048})
    logs = [tracing.trace(cell).memory for cell in (on_a100(training=sharded), buffered)]
    assert logs[1].peak().nbytes - logs[0].peak().nbytes == 2 * MIB
    (number,) = {*logs[1].sizes} - {*logs[0].sizes}
    assert logs[1].events.index(-logs[1].sizes.index(number) - 1) >= logs[1].step_ends[-1]


def test_a_cell_can_have_blocks_that_are_not_split() -> None:
    asked = on_a100(training={"cuda_alloc_conf": "max_split_size_mb:128"})
    assert allocator_of(asked).split_limit == 128 * MIB
    assert trace_key(asked, 0, True) == trace_key(on_a100(), 0, True)
    assert asked.key != on_a100().key


@tabled(__file__, "real_ranks_read_it_from_their_environment")
def test_real_ranks_read_it_from_their_environment(training: dict[str, str], variable: str) -> None:
    asked = on_a100(training=training, engine="distributed")
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
    assert sized.levels(sized.sizes).steps[-1].held["workspaces"] == 4 * MIB


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
