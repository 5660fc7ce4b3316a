"""What Megatron-Core's stages keep of the hidden states that they received."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import only_plain_traces
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.backends.megatron import Megatron

HIDDEN = 2 * 64 * 48 * 2  # of a micro-batch: 2 samples, 64 positions, 48 features, 2 bytes


def left(training: dict[str, Any]) -> dict[int, int]:
    """Bytes at the end of a step, by rank of two stages."""
    asked = {
        "model": "gpt3-tiny",
        "model_options": {"layers": 4},
        "strategy": "single",
        "sizes": {"pp": 2},
        "batch": 4,
        "seq_len": 64,
        "precision": "bf16",
        "training": {"backend": "megatron", "micro_batches": 2, **training},
    }
    by_class = VirtualEngine().measure(Cell.model_validate(asked)).by_class
    return {of["rank"]: of["allocated_bytes"] for of in by_class if of["step"] == 1}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("training", "received"),
    [({}, {0: 0, 1: 1}), ({"schedule": "interleaved", "virtual_stages": 2}, {0: 1, 1: 2})],
    ids=["1f1b", "interleaved"],
)
def test_the_last_input_of_each_stage_and_its_gradient_stay(
    training: dict[str, Any], received: dict[int, int]
) -> None:
    with only_plain_traces():
        kept = left(training)
        with mock.patch.object(Megatron, "keeps_stage_inputs", False):
            freed = left(training)
    assert {rank: kept[rank] - freed[rank] for rank in kept} == {
        r: 2 * n * HIDDEN for r, n in received.items()
    }
