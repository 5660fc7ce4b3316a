"""Micro-batches of which a trace runs some leave the trace of all, at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.trace import step_records
from spbench.bench.measure.trace.recorded_streams import RecordedEvent, Streams
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.keyed_steps import Key, keyed_steps
from spbench.impls.training import pipeline
from spbench.impls.training import step as training_step
from tests.measure.trace.same_traces import differences
from tests.slow import slow

STAGES, MICRO_BATCHES = 3, 10


def cell(backend: str = "legacy_ddp", stages: int = STAGES, replicas: int = 1, **options: Any) -> Cell:
    return Cell.model_validate(
        {
            "model": "gpt3-tiny",
            "model_options": {"layers": max(stages, 2), **options},
            "strategy": "tensor_parallel",
            "sizes": {"pp": stages, "tp": 2, "dp": replicas},
            "batch": replicas * MICRO_BATCHES,
            "seq_len": 16,
            "precision": "fp16",
            "cluster": "dgx-a100",
            "training": {"backend": backend, "micro_batches": MICRO_BATCHES},
        }
    )


class MicroBatches:
    """Counts those that are run; with ``whole`` all of them are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.run, self.whole = 0, False
        monkeypatch.setattr(pipeline, "keyed_steps", self)

    def __call__(self, size: int, key: Key, **how: Any) -> Iterator[int]:
        steps = range(size) if self.whole else keyed_steps(size, key, **how)
        for step in steps:
            self.run += 1
            yield step


@pytest.fixture
def micro_batches(monkeypatch: pytest.MonkeyPatch) -> MicroBatches:
    return MicroBatches(monkeypatch)


def differences_of_steps(asked: Cell, rank: int, micro_batches: MicroBatches) -> list[str]:
    """How a shortened trace differs from a whole one; the count is that of the former."""
    micro_batches.run, micro_batches.whole = 0, False
    shortened = tracing.trace(asked, rank, events=True)
    run = micro_batches.run
    micro_batches.whole = True
    whole = tracing.trace(asked, rank, events=True)
    micro_batches.run = run
    return list(differences(shortened, whole))


@pytest.mark.parametrize(
    ("stage", "run"),
    [
        # what runs ahead, as many again until what dies was born in the steady state, two alike, first, last
        (1, 6),
        slow(0, 8),
        # the losses are kept; the first, two alike, the last
        (2, 5),
    ],
)
def test_some_micro_batches_leave_the_trace_of_all(stage: int, run: int, micro_batches: MicroBatches) -> None:
    assert differences_of_steps(cell(), 2 * stage, micro_batches) == []
    assert micro_batches.run == run


@pytest.mark.slow
def test_recomputed_layers_with_dropout_too(micro_batches: MicroBatches) -> None:
    asked = cell(dropout=0.1, attention_dropout=0.1, attention="unfused", recompute="full")
    assert differences_of_steps(asked, 2, micro_batches) == []
    assert micro_batches.run < MICRO_BATCHES


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "run"), [(1, 6), slow(0, 8), (2, 5)])
def test_checkpoints_on_the_host_too(stage: int, run: int, micro_batches: MicroBatches) -> None:
    """No point of a stream is held from one micro-batch to the next, so as few are run."""
    asked = cell(recompute="full", checkpoints="host")
    assert differences_of_steps(asked, 2 * stage, micro_batches) == []
    assert micro_batches.run == run
    assert len(tracing.trace(asked, 2 * stage).host_memory.sizes) == MICRO_BATCHES


def test_phases_that_are_left_out_are_seen(
    monkeypatch: pytest.MonkeyPatch, micro_batches: MicroBatches
) -> None:
    monkeypatch.setattr(step_records._Changes, "repeat", lambda *arguments: None)
    assert "marks" in differences_of_steps(cell(), 2, micro_batches)


@pytest.mark.parametrize(
    ("backend", "stages", "run"),
    [
        slow("ddp", STAGES, 5),
        ("megatron", STAGES, 5),
        # a stage alone keeps the losses; sharded weights and gradients go over streams of their own
        slow("fsdp_flat", 1, 5),
        slow("zero2", 1, 5),
        slow("zero3", 1, 5),
    ],
)
def test_of_other_backends(backend: str, stages: int, run: int, micro_batches: MicroBatches) -> None:
    asked = cell(backend, stages, 2)
    assert differences_of_steps(asked, 4 * (stages // 2), micro_batches) == []
    assert micro_batches.run == run


def test_all_are_run_where_points_of_streams_are_held(
    monkeypatch: pytest.MonkeyPatch, micro_batches: MicroBatches
) -> None:
    held, watch = [], Streams.watch

    def hold(streams: Streams, event: RecordedEvent) -> None:
        watch(streams, event)
        held.append(event)

    monkeypatch.setattr(Streams, "watch", hold)
    tracing.trace(cell("zero3", 1), 0, events=True)
    assert micro_batches.run == MICRO_BATCHES


class Counting(DistributedDataParallel):
    """Finds the last backward by its number."""

    def zero(self) -> None:
        super().zero()
        self.backwards = 0

    def begin_last_backward(self, stage: nn.Module) -> None:
        pass

    def prepare(self) -> Optimizer:
        self.module.register_forward_hook(lambda *_: self._count())
        return super().prepare()

    def _count(self) -> None:
        self.backwards += 1
        if self.backwards == MICRO_BATCHES:
            super().begin_last_backward(self.module)


def test_a_backend_that_counts_backwards_fails(
    monkeypatch: pytest.MonkeyPatch, micro_batches: MicroBatches
) -> None:
    asked = cell("ddp", 1)
    monkeypatch.setattr(training_step, "backend_class", lambda name: Counting)
    with pytest.raises(AssertionError, match="backward made no gradient"):
        tracing.trace(asked, 0)
    micro_batches.whole = True
    tracing.trace(asked, 0)
