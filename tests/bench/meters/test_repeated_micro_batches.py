"""Micro-batches of which a trace runs some leave the trace of all, at every stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.engines import virtual
from spbench.bench.meters import repeated_steps
from spbench.impls.keyed_steps import Key, keyed_steps
from spbench.impls.training import pipeline
from tests.bench.meters.same_traces import differences
from tests.slow import slow

STAGES, MICRO_BATCHES = 3, 10


def cell(backend: str = "legacy_ddp", **options: Any) -> Cell:
    return Cell.model_validate(
        {
            "model": "gpt3-tiny",
            "model_options": {"layers": STAGES, **options},
            "strategy": "tensor_parallel",
            "sizes": {"pp": STAGES, "tp": 2},
            "batch": MICRO_BATCHES,
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
    shortened = virtual.trace(asked, rank, events=True)
    run = micro_batches.run
    micro_batches.whole = True
    whole = virtual.trace(asked, rank, events=True)
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


def test_phases_that_are_left_out_are_seen(
    monkeypatch: pytest.MonkeyPatch, micro_batches: MicroBatches
) -> None:
    honest = repeated_steps._EventRecord.repeat

    def repeat(self: Any, times: int) -> None:
        marks = list(self.marks)
        honest(self, times)
        self.marks[:] = marks

    monkeypatch.setattr(repeated_steps._EventRecord, "repeat", repeat)
    assert "marks" in differences_of_steps(cell(), 2, micro_batches)


def test_backends_that_count_backwards_run_all(micro_batches: MicroBatches) -> None:
    virtual.trace(cell("ddp"), 2)
    assert micro_batches.run == 0
