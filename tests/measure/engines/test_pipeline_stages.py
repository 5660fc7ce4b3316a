"""Traces of pipeline stages that were put together are those of stages that were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.pipeline_stages import NotAlike, Turns, put_together
from spbench.bench.measure.engines.traces import ClassTraces, Trace
from spbench.impls.models.blocks.decoder import DecoderBlock
from spbench.impls.training.pipeline import StageRun
from tests.measure.trace.same_traces import differences
from tests.slow import slow

#: ranks of the pipeline, a layer each: the first holds 7 micro-batches, the last none
PP = 8


def cell_of(micro_batches: int = 17, **changes: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "causal-transformer-tiny",
        "model_options": {"layers": PP},
        "strategy": "tensor_parallel",
        "sizes": {"pp": PP, "tp": 2},
        "batch": 2 * micro_batches,
        "seq_len": 16,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    training = {"micro_batches": micro_batches, **changes.pop("training", {})}
    return Cell.model_validate(settings | changes | {"training": training})


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that are traced."""
    ranks: list[int] = []
    trace = virtual.trace

    def counted(cell: Cell, rank: int = 0, *, events: bool = False) -> Any:
        ranks.append(rank)
        return trace(cell, rank, events=events)

    monkeypatch.setattr(virtual, "trace", counted)
    return ranks


def check(cell: Cell, traced: list[int]) -> set[int]:
    """Compare a cell with one of which each stage is traced; returns the stages that were put together."""
    quick = virtual.trace_classes(cell, events=True)
    by_trace = {*traced}
    plain = [
        made if made.rank in by_trace else virtual.trace(cell, made.rank, events=True)
        for made in quick.traces
    ]
    for ours, theirs in zip(quick.traces, plain, strict=True):
        assert ours.rank == theirs.rank
        assert differences(ours, theirs) == [], ours.rank
    each_traced = ClassTraces(cell, quick.classes, plain)
    assert quick.measurement() == each_traced.measurement()
    return {each.stage.index for each in quick.classes if each.first not in by_trace}


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, {1}),
        # of stages that hold all micro-batches, one is traced
        ({"training": {"schedule": "gpipe", "micro_batches": 3}, "batch": 6}, {2, 3, 4, 5, 6}),
        ({"training": {"micro_batches": 4}, "batch": 8}, {2, 3}),
        # too few micro-batches for a steady state behind the warm-up
        slow({"micro_batches": 13}, set()),
        # Adam's moments are made by the first of two steps, and gradients summed in the last backward
        slow({"training": {"backend": "megatron", "moments": "later", "steps": 2}}, {1}),
        slow({"model_options": {"layers": PP, "recompute": "full", "checkpoints": "host"}}, {1}),
        # the first and the last of a ring do not do the same; what a stage sends is gathered on the next
        slow({"strategy": "megatron_sp+lasp", "sizes": {"pp": PP, "tp": 2, "sp": 2}, "model": "tnl-tiny",
          "model_options": {"layers": PP, "attention_norm": "head"}}, {1}),
        slow(
            {"training": {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 8}, "batch": 8,
             "model_options": {"layers": 2 * PP}},
            set(),
        ),
    ],
)  # fmt: skip
def test_stages_are_as_if_each_were_traced(
    changes: dict[str, Any], together: set[int], traced: list[int]
) -> None:
    assert check(cell_of(**changes), traced) == together


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "zero1", "legacy_ddp"])
@pytest.mark.parametrize("pp", [10, 12])
def test_deeper_pipelines(pp: int, backend: str, traced: list[int]) -> None:
    sizes = {"pp": pp, "tp": 2, "dp": 2}
    options = {"layers": pp, "checkpointing": True}
    cell = cell_of(27, batch=54, sizes=sizes, model_options=options, training={"backend": backend})
    assert check(cell, traced) == set(range(1, pp - 6))


def test_without_events(traced: list[int]) -> None:
    cell = cell_of(batch=6, training={"schedule": "gpipe", "micro_batches": 3})
    quick = virtual.trace_classes(cell)
    assert [trace.program for trace in quick.traces] == [None] * PP
    assert len(traced) == 3
    assert differences(quick.traces[3], virtual.trace(cell, 2 * 3)) == []


def at_the_eighth_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, number = StageRun.forward, [0]

    def other(self: StageRun, *args: Any) -> Any:
        number[0] += 1
        if number[0] % 17 == 8:
            torch.ones(3)
        return forward(self, *args)

    monkeypatch.setattr(StageRun, "forward", other)


def layers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DecoderBlock.__init__

    def numbered(self: DecoderBlock, model: Any, strategy: Any, number: int) -> None:
        made(self, model, strategy, number)
        self.window = number

    monkeypatch.setattr(DecoderBlock, "__init__", numbered)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [at_the_eighth_micro_batch, slow(layers_of_their_own)])
def test_stages_that_differ_otherwise_are_traced(
    setting: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, traced: list[int]
) -> None:
    setting(monkeypatch)
    # of this backend every forward is run, so that its number is that of the micro-batch
    assert check(cell_of(training={"backend": "ddp"}), traced) == set()


def a_storage_larger(trace: Trace) -> Trace:
    trace.memory.sizes[-1] += 512
    return trace


def a_kernel_slower(trace: Trace) -> Trace:
    assert trace.program is not None
    trace.program.flops[100] += 1
    return trace


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fault", "field"), [(a_storage_larger, "sizes"), (a_kernel_slower, "flops")])
@pytest.mark.parametrize("proof", [True, slow(False)])
def test_a_fault_is_seen(
    kept_traces: None,
    fault: Callable[[Trace], Trace],
    field: str,
    proof: bool,
    monkeypatch: pytest.MonkeyPatch,
    traced: list[int],
) -> None:
    """By the proof, so that each stage is traced; without it, by these tests."""
    monkeypatch.setattr(virtual, "put_together", lambda *args: fault(put_together(*args)))
    if proof:
        assert check(cell_of(), traced) == set()
        return
    monkeypatch.setattr(virtual, "same", lambda ours, theirs: True)
    with pytest.raises(AssertionError, match=field):
        check(cell_of(), traced)


def test_what_is_not_made_of_turns_is_refused() -> None:
    trace = virtual.trace(cell_of(), 2 * (PP - 1 - 4))
    held = Turns(17, 4)
    assert put_together(trace, held, Turns(17, 5)).memory.events != trace.memory.events
    with pytest.raises(NotAlike, match="turn 0 is"):
        put_together(trace, Turns(17, 0), Turns(17, 5))
    trace.memory.marks.append(("forward", 1))
    with pytest.raises(NotAlike, match="forward comes after the last step"):
        put_together(trace, held, Turns(17, 5))
