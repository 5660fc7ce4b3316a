"""The virtual engine: its numbers against closed forms, real ranks and the papers' own counts.
Steps of the strategies that sequence parallelism is compared with, on sequences and on grids: closed form,
virtual ranks and real ranks send the same bytes.
Strategies around each other: virtual ranks, real ranks and closed forms agree, axis by axis."""

import dataclasses
import gc
import pickle
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import record_step, set_up
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.place import ALONE
from spbench.impls.registries import all_backends, all_strategies, strategy_class
from spbench.impls.strategies.nesting import Nesting, all_pairs, nesting
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.traffic import Traffic
from tests.measure.engines.cells import AXES, cell_of, sent_bytes, write_cluster
from tests.slow import mostly_slow, slow


def sent(strategy: str, n: int, **changes: Any) -> dict[tuple[str, str], Fraction]:
    return sent_bytes(tracing.trace(cell_of(strategy, n, **changes)).communication)


@pytest.mark.parametrize("n", [2, 3, 4, 64])
def test_bytes_of_ring_self_attention_as_its_paper_counts_them(n: int) -> None:
    """Section 3.2.2: 2(N-1)BZ(L/N)A elements forward and 6(N-1)BZ(L/N)A backward, a layer."""
    batch, heads, length, head_size, layers = 3, 12, 2 * n, 4, 2
    a_ring = (n - 1) * batch * heads * (length // n) * head_size * 4
    bytes_sent = sent("ring_self_attention", n, batch=batch, seq_len=length)
    assert bytes_sent["forward", "send"] == layers * 2 * a_ring
    backward = bytes_sent["backward", "send"] + bytes_sent["backward", "all_reduce"]
    assert backward == layers * 6 * a_ring
    assert set(bytes_sent) == {
        ("forward", "send"),
        ("backward", "send"),
        ("backward", "all_reduce"),
        ("gradient_sync", "all_reduce"),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [2, 3, 4, 12])
def test_bytes_of_tensor_parallelism_as_the_ring_paper_counts_them(n: int) -> None:
    """Section 3.2.2: 8(N-1)BZ(L/N)A elements a layer, forward and backward together, half in each."""
    batch, heads, length, head_size = 3, 12, 24, 4
    shallow, deep = (
        sent("tensor_parallel", n, batch=batch, seq_len=length, model_options={"layers": layers})
        for layers in (2, 3)
    )
    a_layer = {key: deep[key] - shallow[key] for key in deep if deep[key] != shallow[key]}
    half = Fraction(4 * (n - 1) * batch * heads * length * head_size * 4, n)
    assert a_layer == {("forward", "all_reduce"): half, ("backward", "all_reduce"): half}


def test_gradients_are_summed_once() -> None:
    n = 4
    cell = cell_of("ring_self_attention", n, precision="fp16")
    with tracing.fake_mesh(cell.mesh_sizes, 0) as mesh:
        parameters = sum(p.numel() for p in set_up(cell, mesh)[0].module.parameters())
    bytes_sent = sent_bytes(tracing.trace(cell).communication)
    assert bytes_sent["gradient_sync", "all_reduce"] == Fraction(2 * (n - 1), n) * parameters * 2


@pytest.mark.parametrize("cls", [TensorParallel, RingSelfAttention])
def test_formula_that_is_off_by_one_payload_is_reported(
    monkeypatch: pytest.MonkeyPatch, cls: type[TensorParallel] | type[RingSelfAttention]
) -> None:
    honest = cls.communication

    def planted(self: Any, sites: Any, element_bytes: int) -> Iterator[Traffic]:
        entries = list(honest(self, sites, element_bytes))
        wrong = next(i for i, entry in enumerate(entries) if entry.phase == "backward")
        entries[wrong] = dataclasses.replace(entries[wrong], count=entries[wrong].count + 1)
        yield from entries

    cell = cell_of(cls.name, 4)
    assert VirtualEngine().measure(cell).formula_difference == []
    monkeypatch.setattr(cls, "communication", planted)
    measured = VirtualEngine().measure(cell)
    (row,) = measured.formula_difference
    assert (measured.status, row["rank"]) == ("mismatch", 0)
    assert measured.reason.startswith(
        f"backward {row['collective']} on rank 0: {row['metered_bytes']} bytes, "
    )
    assert row["phase"] == "backward"
    # TP: an all-reduce of BLH = 3 x 24 x 48 floats; RSA: a send of BZ(L/N)A = 3 x 12 x 6 x 4 floats
    more = {"all_reduce": 3 * 24 * 48 * 4 * 2 * 3 // 4, "send": 3 * 12 * 6 * 4 * 4}[row["collective"]]
    assert row["formula_bytes"] - row["metered_bytes"] == more


def test_formula_that_forgets_a_phase_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "communication", lambda self, sites, element_bytes: iter(()))
    rows = VirtualEngine().measure(cell_of("tensor_parallel", 2, precision="fp16")).formula_difference
    assert [(row["phase"], row["formula_bytes"]) for row in rows] == [
        ("backward", 0),
        ("forward", 0),
        ("optimizer", 0),
    ]


# -- ranks, repetition, other people's process groups -------------------------------------------------------


@pytest.mark.parametrize("strategy", AXES)
@pytest.mark.parametrize("n", [4, 6])
def test_any_rank_can_be_traced_and_all_hold_the_same(strategy: str, n: int) -> None:
    cell = cell_of(strategy, n)
    first = tracing.trace(cell, 0).measurement(None)
    for rank in range(1, n, 2):
        assert tracing.trace(cell, rank).measurement(None).model_copy(update={"peak_rank": 0}) == first


@pytest.mark.parametrize("strategy", ["single", *AXES])
def test_two_traces_are_equal(strategy: str) -> None:
    cell = cell_of(
        strategy, 1 if strategy == "single" else 3, precision="fp16", model_options={"dropout": 0.1}
    )
    first, second = tracing.trace(cell), tracing.trace(cell)
    assert first.memory == second.memory
    assert first.communication.counts == second.communication.counts


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    [("tensor_parallel", True), ("ring_self_attention", False), *map(slow, AXES, (False, True))],
)
def test_tensors_die_by_the_program_not_by_the_garbage_collector(strategy: str, checkpointing: bool) -> None:
    """Else a peak would depend on when Python looks for cycles; real ranks do not turn that off."""
    cell = cell_of(strategy, 2, model_options={"checkpointing": checkpointing})
    gc.collect()
    with tracing.fake_mesh(cell.mesh_sizes, 0) as mesh, no_cyclic_collection():
        recorder = Recorder(mesh)
        with FakeTensorMode(), recorder:
            held = record_step(cell, mesh, recorder)
        events = len(recorder.memory.log.events)
        gc.collect()
        assert len(recorder.memory.log.events) == events
        del held


def test_tracing_leaves_no_trace() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tracing.trace(cell_of("tensor_parallel", 2, precision="fp16"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_default_dtype() is torch.float32
    assert not dist.is_initialized()
    assert gc.isenabled()


def test_a_failed_trace_leaves_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "record_step", lambda *args, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tracing.trace(cell_of("tensor_parallel", 2))
    assert not dist.is_initialized()
    assert gc.isenabled()


def test_no_trace_inside_another_process_group() -> None:
    with tracing.fake_mesh({}, 0), pytest.raises(RuntimeError, match="process group exists"):
        tracing.trace(cell_of("single", 1))


# -- sizes that cannot be ---------------------------------------------------------------------------------


def test_out_of_memory_is_judged_on_what_the_allocator_reserves(tmp_path: Path) -> None:
    large = {"batch": 8, "seq_len": 512}
    free = VirtualEngine().measure(cell_of("single", 1, **large))
    assert free.status == "ok"
    assert free.peak_memory_bytes <= free.reserved_memory_bytes
    assert sum(free.peak_held.values()) == free.peak_memory_bytes
    needed = free.reserved_memory_bytes // 2**20
    fits = VirtualEngine().measure(cell_of("single", 1, **large, cluster=write_cluster(tmp_path, needed)))
    assert (fits.status, fits.reason) == ("ok", "")
    # the trace is of the whole step on any card, and only what it reserves before it fails differs
    little = free.peak_memory_bytes // 2**20 - 1
    fails = VirtualEngine().measure(cell_of("single", 1, **large, cluster=write_cluster(tmp_path, little)))
    assert fails.status == "oom"
    assert re.fullmatch(
        r"no room for \d+ MiB with \d+ MiB allocated and \d+ MiB reserved, in forward of step 1 on rank 0; "
        r"the step needs 0\.\d GiB at its peak, most of it for activations, of which recomputation keeps"
        r" fewer",
        fails.reason,
    )
    assert fails.peak_memory_bytes == free.peak_memory_bytes
    assert fails.reserved_memory_bytes <= little * 2**20


GRID = "st-dit-tiny"


def cell_along(strategy: str, n: int, model: str = GRID, **changes: Any) -> Cell:
    sizes, batch = strategy_class(strategy).sizes_for(n), 2 if model == GRID else 3
    options = {"model": model, "strategy": strategy, "sizes": sizes, "batch": batch, "seq_len": 24}
    return Cell.model_validate(options | changes)


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_told_is_of_a_rank_that_sends(n: int) -> None:
    """The last rank of a ring sends no state forward, and may yet have the largest peak."""
    told = VirtualEngine().measure(cell_along("lasp", n, "tnl-tiny"))
    metered, planned = (
        sum(row["sent_bytes"] for row in rows if (row["phase"], row["collective"]) == ("forward", "send"))
        for rows in (told.communication, told.formula)
    )
    assert metered == planned > 0


# -- grids ---------------------------------------------------------------------------------------------------


def inference(strategy: str, n: int, **changes: Any) -> Cell:
    return cell_along(strategy, n, precision="bf16", training={"step": "inference"}, **changes)


@pytest.mark.parametrize("strategy", ["dsp", "megatron_sp", "ring_attention"])
def test_inference_is_the_forward_of_a_training_step(strategy: str) -> None:
    """It sends what a forward does, and holds the weights and little else."""
    trained = VirtualEngine().measure(cell_along(strategy, 4, precision="bf16"))
    inferred = VirtualEngine().measure(inference(strategy, 4))
    assert inferred.formula_difference == []
    assert inferred.communication == [row for row in trained.communication if row["phase"] == "forward"]
    assert inferred.peak_memory_bytes < trained.peak_memory_bytes / 3
    assert inferred.peak_held["parameters"] > 0
    assert not inferred.peak_held.get("gradients", 0) + inferred.peak_held.get("optimizer_state", 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [3, 12])
def test_bytes_are_those_of_the_paper(n: int) -> None:
    """Section 3.3, of a layer of two dims forward, M elements in a grid: DSP 2 M/N and Ulysses 4 M/N, of
    which (N-1)/N leave the rank; Megatron-SP 8 M, an all-gather and a reduce-scatter each of attention along
    two dims, attention to the text and the MLP, of which (N-1)/N; Ring Attention 2 M, of which (N-1)/N."""
    grid = 2 * 12 * 24 * 24 * 4  # B T S H float32
    per_layer = {
        ("dsp", "all_to_all"): Fraction(2 * grid, n) * Fraction(n - 1, n),
        ("ulysses", "all_to_all"): Fraction(4 * grid, n) * Fraction(n - 1, n),
        ("ring_attention", "send"): 2 * grid * Fraction(n - 1, n),
    }
    for (strategy, collective), expected in per_layer.items():
        assert sent_by_a_layer(strategy, n)["forward", collective] == expected
    by_blocks = sent_by_a_layer("megatron_sp", n)
    both = by_blocks["forward", "all_gather"] + by_blocks["forward", "reduce_scatter"]
    assert both == 8 * grid * Fraction(n - 1, n)


def sent_by_a_layer(strategy: str, n: int) -> dict[tuple[str, str], Fraction]:
    cell = cell_along(strategy, n, seq_len=12 * 24, model_options={"layers": 1})
    return sent_bytes(tracing.trace(cell).communication)


def nested_cell(strategy: str, model: str, sizes: dict[str, int], changes: dict[str, Any]) -> Cell:
    fields = {"batch": 4, "seq_len": 24, "precision": "fp32"} | changes
    return Cell(model=model, strategy=strategy, sizes=Sizes(**sizes), **fields)


@pytest.mark.parametrize("backend", mostly_slow(all_backends(), "ddp", "megatron", "zero3", "fsdp_flat"))
def test_four_axes_send_what_the_closed_form_says(backend: str) -> None:
    pp = 2 if all_backends()[backend].pipelined else 1
    training = TrainingOptions(backend=backend, micro_batches=2)
    sizes = {"dp": 2, "pp": pp, "tp": 3, "sp": 4}
    cell = nested_cell("megatron_sp+ring_self_attention", "bert-tiny-linformer", sizes, {"precision": "fp16"})
    measured = VirtualEngine().measure(cell.model_copy(update={"training": training}))
    assert measured.formula_difference == []
    axes = {row["axis"] for row in measured.communication}
    assert axes >= {"tp", "sp"}
    # of what is not split, of heads and features, of columns of the sequence
    summed = {"dp_tp_sp", "dp_sp", "dp_tp"} if backend != "legacy_ddp" else {"tp_sp", "sp", "tp", "dp"}
    assert axes >= summed


def test_a_tensor_between_stages_is_sent_in_parts_of_both_axes() -> None:
    sizes = {"pp": 2, "tp": 2, "sp": 2}
    cell = nested_cell("tensor_parallel+ring_self_attention", "bert-tiny", sizes, {})
    first = tracing.trace(cell, rank=0).measurement(None)
    (sent,) = (row for row in first.communication if (row["phase"], row["axis"]) == ("forward", "pp"))
    assert sent["collective"] == "send"
    assert sent["sent_bytes"] == 4 * 24 * 48 * 4 / (2 * 2)  # B L H in float32


def test_pairs_are_all_that_can_be() -> None:
    found = {pair.name for pair in all_pairs()}
    every = all_strategies()
    inner = {name for name, cls in every.items() if cls.axes and not cls.splits_features}
    assert found == {
        f"{outer}+{name}"
        for outer in ("tensor_parallel", "megatron_sp", "odysseus", "ulysses", "upipe")
        for name in inner - {outer}
        if every[outer].meets & every[name].meets  # positions meet by both, such as by causal attention
    }
    assert len(found) > 40


def test_options_of_all_are_given_by_name() -> None:
    found = nesting("ulysses+ring_attention")
    outer = found.configured(ALONE, {"pad_heads": True, "placement": "zigzag"})
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
