"""Memory in an allocator's blocks, for each class of ranks and at each of several traced steps."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import distributed, tracing
from spbench.bench.measure.engines.plan import RankClass, plan
from spbench.bench.measure.engines.rank_memory import RankMemory, needs
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog, Peak
from spbench.impls.composition import Stage
from spbench.impls.strategies.base import Unsupported
from tests.measure.engines.cells import differing_fields, write_cluster

MIB = 2**20


def cell_of(steps: int = 1, **changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "bert-tiny",
        "strategy": "single",
        "batch": 4,
        "seq_len": 128,
        "precision": "fp16",
        "cluster": "piz-daint-p100",
    }
    training = {"steps": steps, **changes.pop("training", {})}
    return Cell.model_validate(settings | changes | {"training": training})


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


STATES = ", most of it for model states,"


@pytest.mark.parametrize(
    ("category", "sizes", "backend", "advice"),
    [
        ("optimizer_state", {"dp": 2}, "ddp", f"{STATES} which the backend zero3 shards over replicas"),
        (
            "optimizer_state",
            {"dp": 2, "pp": 2},
            "ddp",
            f"{STATES} which the backend zero3 shards over replicas",
        ),
        (
            "optimizer_state",
            {"dp": 2, "pp": 2},
            "megatron",
            f"{STATES} of which distributed_optimizer shards",
        ),
        ("optimizer_state", {"dp": 2}, "zero3", f"{STATES} of which ranks along tp or pp hold fewer"),
        ("optimizer_state", {"pp": 2}, "ddp", f"{STATES} of which ranks along tp or pp hold fewer"),
        ("activations", {"dp": 2}, "ddp", ", most of it for activations, of which recomputation keeps fewer"),
        ("temporaries", {"dp": 2}, "ddp", ""),
    ],
)
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
    first, second = lazy.memory.peaks(lazy.memory.sizes)
    (steady,) = kept.memory.peaks(kept.memory.sizes)
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


def test_inference_has_one_step() -> None:
    with pytest.raises(Unsupported, match="an inference step has no steps before it"):
        VirtualEngine().measure(cell_of(2, training={"step": "inference"}))


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
