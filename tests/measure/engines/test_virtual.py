"""The virtual engine: its numbers against closed forms, real ranks and the papers' own counts."""

import dataclasses
import gc
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import record_step, set_up
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.traffic import Traffic
from tests.measure.engines.cells import AXES, cell_of, on_real_ranks, seen, write_cluster
from tests.slow import slow

RANKS = [
    ("single", 1),
    *((strategy, 2) for strategy in AXES),
    *(slow(strategy, n) for strategy in AXES for n in (1, 3, 4)),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("model", "precision", "checkpointing"),
    [
        ("bert-tiny", "fp32", False),
        ("bert-tiny", "fp16", True),
        ("bert-tiny-linformer", "fp16", False),
        slow("bert-tiny", "fp16", False),
        slow("bert-tiny", "fp32", True),
        slow("bert-tiny-linformer", "fp32", False),
        slow("bert-tiny-linformer", "fp16", True),
    ],
)
@pytest.mark.parametrize(("strategy", "n"), RANKS)
def test_virtual_ranks_are_as_real_ones(
    pool: RankPool, strategy: str, model: str, n: int, checkpointing: bool, precision: str
) -> None:
    """Closed form, virtual rank and Gloo rank send the same bytes, operation by operation, and hold the same
    bytes at the peak: every rank, nothing rounded."""
    cell = cell_of(
        strategy, n, model=model, precision=precision, model_options={"checkpointing": checkpointing}
    )
    virtually = [seen(tracing.trace(cell, rank)) for rank in range(n)]
    lowest = on_real_ranks(pool, {AXES.get(strategy, "sp"): n}, cell, virtually)
    assert lowest == virtually
    assert all(not v.difference for v in virtually)
    assert all(bool(v.counts) is (n > 1) for v in virtually)


def sent(strategy: str, n: int, **changes: Any) -> dict[tuple[str, str], Fraction]:
    return tracing.trace(cell_of(strategy, n, **changes)).communication.sent_bytes()


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
    bytes_sent = tracing.trace(cell).communication.sent_bytes()
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
