"""The distributed engine on this machine's CPUs.

The order of the mesh: the same bytes and memory on other ranks, and so other times between nodes.

Strategies around each other: virtual ranks, real ranks and closed forms agree, axis by axis.
"""

from __future__ import annotations

import os
import pickle
import re
import statistics
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell, Sizes, Timing, TrainingOptions
from spbench.bench.measure.engines import distributed, tracing, virtual
from spbench.bench.measure.engines.distributed import DistributedEngine
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.place import ALONE
from spbench.impls.registries import backends, strategies
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.nesting import Nesting, nesting, pairs
from spbench.impls.strategies.upipe import UPipe
from spbench.impls.training.step import initialize
from tests.measure.engines.cells import ATTEMPTS, on_real_ranks, seen
from tests.slow import mostly_slow

CELL = Cell(
    model="bert-tiny",
    strategy="ring_self_attention",
    sizes=Sizes(sp=2),
    batch=3,
    seq_len=24,
    engine="distributed",
    timing=Timing(warmup=1, samples=4),
)


def test_two_ranks() -> None:
    measured = DistributedEngine().measure(CELL)
    assert (measured.status, measured.reason) == ("ok", "")
    assert len(measured.step_time_samples_s) == 4
    assert all(0 < sample < 60 for sample in measured.step_time_samples_s)
    assert measured.step_time_s == statistics.median(measured.step_time_samples_s)
    assert measured.tokens_per_s == 3 * 24 / measured.step_time_s
    assert measured.formula_difference == []
    expected = VirtualEngine().measure(CELL)
    assert measured.communication == expected.communication
    assert measured.formula == expected.formula
    assert measured.peak_memory_bytes is not None
    assert expected.peak_memory_bytes is not None
    # equal unless Gloo's thread held a tensor longer (see test_virtual); never less
    assert expected.peak_memory_bytes <= measured.peak_memory_bytes < 1.1 * expected.peak_memory_bytes
    assert sum(measured.peak_held.values()) == measured.peak_memory_bytes
    assert measured.reserved_memory_bytes == expected.reserved_memory_bytes


def test_a_rank_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = plan(CELL)
    monkeypatch.setattr(distributed, "plan", lambda cell: fine)  # in this process; the ranks find out
    wrong = {"strategy": "ulises", "timing": Timing(warmup=0, samples=1)}
    with pytest.raises(RankError, match="unknown strategy 'ulises'") as raised:
        DistributedEngine().measure(CELL.model_copy(update=wrong))
    assert re.fullmatch(r"rank [01]: KeyError: .unknown strategy 'ulises'; choices: .*", raised.value.reason)
    assert raised.value.status == "failed"


def threads_of_rank(mesh: DeviceMesh, cell: Cell) -> int:
    return torch.get_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or usable_cores() < 2, reason="needs two cores")
def test_ranks_share_the_cores_that_they_may_use() -> None:
    """Not those of the machine, of which a container or Slurm may have given only some."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        cell = CELL.model_copy(update={"sizes": Sizes(), "strategy": "single"})
        assert distributed.launch(cell, threads_of_rank) == {0: 1}
    finally:
        os.sched_setaffinity(0, usable)


def test_unsupported_sizes_start_no_rank() -> None:
    with pytest.raises(Unsupported, match="length 25"):
        DistributedEngine().measure(CELL.model_copy(update={"seq_len": 25}))


def weights_after_the_metered_step(mesh: DeviceMesh, cell: Cell) -> tuple[bool, bool, int]:
    """Whether the weights are those of the seed before an update, finite after one; and the metered peak."""
    recorder = Recorder(mesh, settle_s=0.002)
    with recorder:
        training, _ = record_step(
            cell, mesh, recorder, torch.Generator().manual_seed(1), partial(initialize, seed=1)
        )
    log = recorder.memory.stop()
    updated = {name: p.detach().clone() for name, p in training.module.named_parameters()}
    initialize(training.module, 1)
    near = all((updated[n] - p).abs().max() < 1e-2 for n, p in training.module.named_parameters())
    return near, all(p.isfinite().all() for p in updated.values()), log.peak().nbytes


def test_the_metered_step_runs_on_real_weights_that_the_meter_does_not_see(pool: RankPool) -> None:
    cell = Cell(model="bert-tiny", strategy="single", batch=2, seq_len=24)
    near, finite, peak = pool.run({}, weights_after_the_metered_step, cell)[0]
    assert near
    assert finite
    assert peak == VirtualEngine().measure(cell).peak_memory_bytes


#: replicas across two nodes of eight, sequences inside; and the reverse
ORDERS = REPLICAS_OUTSIDE, SEQUENCES_OUTSIDE = ["dp", "sp"], ["sp", "dp"]
#: attention outweighs the sum of gradients, so that sequences inside a node are the better order
WORK = {"layers": 2, "hidden": 256, "heads": 16, "inner": 256}


def cell(mesh: list[str], strategy: str = "ring_attention", **changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "tnl-tiny" if strategy == "lasp" else "causal-transformer-tiny",
        "strategy": strategy,
        "sizes": {"dp": 2, "sp": 8},
        "mesh": mesh,
        "batch": 4,
        "seq_len": 8192,
        "precision": "bf16",
        "cluster": "dgx-a100-datasheet",
        "model_options": WORK if strategy != "lasp" else {},
    }
    return Cell.model_validate(settings | changes)


def test_an_axis_across_nodes_takes_longer_and_sends_and_holds_the_same() -> None:
    inside, outside = (VirtualEngine().measure(cell(mesh)) for mesh in ORDERS)
    assert inside.status == outside.status == "ok"
    assert inside.step_time_s is not None
    assert outside.step_time_s is not None
    assert outside.step_time_s > 1.2 * inside.step_time_s
    # a mean over ranks, which are summed in another order
    assert inside.breakdown["compute_s"] == pytest.approx(outside.breakdown["compute_s"], rel=1e-12)
    for field in ("communication", "formula", "peak_memory_bytes", "reserved_memory_bytes", "peak_held"):
        assert getattr(inside, field) == getattr(outside, field), field


def test_on_one_node_the_order_makes_no_difference() -> None:
    """All links are alike there, so that it is the nodes that make one."""
    on_one = {"sizes": {"dp": 2, "sp": 4}}
    first, second = (VirtualEngine().measure(cell(mesh, **on_one)) for mesh in ORDERS)
    assert first.step_time_s == pytest.approx(second.step_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("mesh", "replicas", "chunks"),
    [(REPLICAS_OUTSIDE, [3, 11], [*range(8)]), (SEQUENCES_OUTSIDE, [6, 7], [*range(1, 16, 2)])],
    ids=["dp outside", "sp outside"],
)
def test_collectives_are_simulated_among_the_ranks_of_their_groups(
    mesh: list[str], replicas: list[int], chunks: list[int]
) -> None:
    """The two replicas of sequence rank 3, and all sequence ranks of the replica of the last rank."""
    traces = virtual.trace_classes(cell(mesh, "ulysses", seq_len=128), events=True)
    timeline = traces.simulator()()

    def groups(rank: int) -> set[tuple[int, ...]]:
        parties = (event.details.get("ranks") for event in timeline.events(rank))
        return {tuple(ranks) for ranks in parties if ranks}

    assert tuple(replicas) in groups(replicas[0])
    assert tuple(chunks) in groups(chunks[-1])


def test_ranks_of_a_class_are_those_of_the_order() -> None:
    """The last of LASP's ranks sends no state; each class has both replicas."""
    by_order = [[each.ranks for each in rank_classes(cell(mesh, "lasp"))] for mesh in ORDERS]
    assert by_order[0][-1] == (7, 15)
    assert by_order[1][-1] == (14, 15)
    for classes in by_order:
        assert sorted(rank for ranks in classes for rank in ranks) == [*range(16)]


@pytest.mark.slow
def test_real_ranks_meter_the_same_in_both_orders(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LASP's last ranks send no state; were they others than planned, bytes would differ from the closed
    form."""
    small = {
        "engine": "distributed",
        "sizes": {"dp": 2, "sp": 2},
        "seq_len": 24,
        "precision": "fp32",
        "cluster": "local",
        "timing": Timing(warmup=0, samples=1),
        "model_options": {},
    }
    launch = "spbench.bench.measure.engines.distributed.launch"  # the ranks of the pool in place of new ones
    monkeypatch.setattr(launch, lambda cell, work: dict(enumerate(pool.run(cell.mesh_sizes, work, cell))))
    one, other = (DistributedEngine().measure(cell(mesh, "lasp", **small)) for mesh in ORDERS)
    expected = VirtualEngine().measure(cell(SEQUENCES_OUTSIDE, "lasp", **small))
    assert one.status == other.status == "ok"
    assert one.communication == other.communication == expected.communication
    assert one.formula == other.formula
    assert one.formula_difference == other.formula_difference == []


ZIGZAG: dict[str, Any] = {"strategy_options": {"placement": "zigzag"}}
#: a pair, a model, further fields
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("tensor_parallel+ring_self_attention", "bert-tiny", {"precision": "fp16"}),
    ("megatron_sp+ring_self_attention", "bert-tiny-linformer", {"precision": "fp16"}),
    ("megatron_sp+ring_attention", "causal-transformer-tiny", ZIGZAG),
    ("ulysses+ring_attention", "causal-transformer-tiny", ZIGZAG),
    ("tensor_parallel+lasp", "linear-llama3-tiny", {"model_options": {"checkpointing": True}}),
    ("tensor_parallel+dsp", "st-dit-tiny", {}),
]


def cell_of(strategy: str, model: str, sizes: dict[str, int], changes: dict[str, Any]) -> Cell:
    fields = {"batch": 4, "seq_len": 24, "precision": "fp32"} | changes
    return Cell(model=model, strategy=strategy, sizes=Sizes(**sizes), **fields)


#: each strategy around, and what is within: attention in turns, in a ring, and states
ALWAYS = ("megatron_sp+ring_self_attention", "ulysses+ring_attention")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "model", "changes"),
    [pytest.param(*of, id=of[0], marks=[] if of[0] in ALWAYS else pytest.mark.slow) for of in CELLS],
)
def test_virtual_ranks_are_as_real_ones(
    pool: RankPool, strategy: str, model: str, changes: dict[str, Any]
) -> None:
    """Every rank sends the same operations over the same axes, and holds the same bytes at its peak, where
    Gloo's reduce-scatter makes no copies."""
    (sizes,) = nesting(strategy).meshes(4)
    cell = cell_of(strategy, model, sizes, changes)
    virtually = [seen(tracing.trace(cell, rank)) for rank in range(4)]
    exact = not any(operation.collective == "reduce_scatter" for v in virtually for operation in v.counts)
    really = on_real_ranks(pool, sizes, cell, virtually, attempts=ATTEMPTS if exact else 1)
    assert [r.counts for r in really] == [v.counts for v in virtually]
    assert not exact or [r.peak for r in really] == [v.peak for v in virtually]
    assert not any(r.difference or v.difference for r, v in zip(really, virtually, strict=True))
    assert {operation.axis for v in virtually for operation in v.counts} >= set(sizes)


@pytest.mark.parametrize("backend", mostly_slow(backends(), "ddp", "megatron", "zero3", "fsdp_flat"))
def test_four_axes_send_what_the_closed_form_says(backend: str) -> None:
    pp = 2 if backends()[backend].pipelined else 1
    training = TrainingOptions(backend=backend, micro_batches=2)
    sizes = {"dp": 2, "pp": pp, "tp": 3, "sp": 4}
    cell = cell_of("megatron_sp+ring_self_attention", "bert-tiny-linformer", sizes, {"precision": "fp16"})
    measured = VirtualEngine().measure(cell.model_copy(update={"training": training}))
    assert measured.formula_difference == []
    axes = {row["axis"] for row in measured.communication}
    assert axes >= {"tp", "sp"}
    # of what is not split, of heads and features, of columns of the sequence
    summed = {"dp_tp_sp", "dp_sp", "dp_tp"} if backend != "legacy_ddp" else {"tp_sp", "sp", "tp", "dp"}
    assert axes >= summed


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("tensor_parallel+ulysses+ring_attention", {"tp": 2, "sp": 3, "cp": 4}),
        ("megatron_sp+ulysses+ring_attention", {"tp": 2, "sp": 2, "cp": 2, "dp": 2}),
    ],
)
def test_three_around_each_other_send_what_the_closed_form_says(strategy: str, sizes: dict[str, int]) -> None:
    measured = VirtualEngine().measure(cell_of(strategy, "causal-transformer-tiny", sizes, {"seq_len": 48}))
    assert measured.formula_difference == []


def test_a_tensor_between_stages_is_sent_in_parts_of_both_axes() -> None:
    sizes = {"pp": 2, "tp": 2, "sp": 2}
    cell = cell_of("tensor_parallel+ring_self_attention", "bert-tiny", sizes, {})
    first = tracing.trace(cell, rank=0).measurement(None)
    (sent,) = (row for row in first.communication if (row["phase"], row["axis"]) == ("forward", "pp"))
    assert sent["collective"] == "send"
    assert sent["sent_bytes"] == 4 * 24 * 48 * 4 / (2 * 2)  # B L H in float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ring_attention+ulysses", r"cannot be around another strategy; write ulysses\+ring_attention"),
        ("ring_attention+lasp", r"ring_attention cannot be around another strategy$"),
        ("ulysses+tensor_parallel", "tensor_parallel splits weights, which only the outermost strategy can"),
        ("ulysses+single", "single uses no ranks; leave it out"),
        ("tensor_parallel+ulysses+ulysses+ring_attention", "no axis is left for ring_attention"),
    ],
)
def test_what_cannot_be_around_what(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nesting(name)


def test_sizes_that_cannot_be_say_what_would_do() -> None:
    cell = cell_of("ulysses+ring_attention", "causal-transformer-tiny", {"sp": 4, "cp": 3}, {})
    assert VirtualEngine().measure(cell.model_copy(update={"seq_len": 24})).status == "ok"
    with pytest.raises(Unsupported, match=r"length 30 is not divisible by 12 ranks; use .* 24 or 36"):
        VirtualEngine().measure(cell.model_copy(update={"seq_len": 30}))


def test_pairs_are_all_that_can_be() -> None:
    found = {pair.name for pair in pairs()}
    inner = {name for name, cls in strategies().items() if cls.axes and not cls.splits_features}
    assert found == {
        *(f"{outer}+{name}" for outer in ("tensor_parallel", "megatron_sp", "odysseus") for name in inner),
        *(f"ulysses+{name}" for name in inner - {"ulysses"}),
        # all that positions of causal attention meet by
        *(f"upipe+{name}" for name in inner - {"upipe"} if UPipe.meets & strategies()[name].meets),
    }


def test_options_of_all_are_given_by_name() -> None:
    found = nesting("ulysses+ring_attention")
    outer = found.configured(ALONE, {"pad_heads": True, "placement": "zigzag"})
    assert outer.within is not None
    assert (outer.options.pad_heads, outer.within.options.placement) == (True, "zigzag")  # type: ignore[attr-defined]
    assert (outer.axes, outer.within.axes) == (("sp",), ("cp",))
    with pytest.raises(KeyError, match=r"strategy ulysses\+ring_attention has no option 'turn'; it has: "):
        found.configured(ALONE, {"turn": 1})
    with pytest.raises(ValueError, match=r"placement is one of contiguous, .*, by_work, not 'spiral'"):
        found.configured(ALONE, {"placement": "spiral"})


def test_a_nesting_is_pickled_by_its_classes() -> None:
    found = nesting("tensor_parallel+ring_attention")
    assert found.options_type is not None  # a class made here, which cannot be pickled
    assert pickle.loads(pickle.dumps(found)) == Nesting(found.classes)
