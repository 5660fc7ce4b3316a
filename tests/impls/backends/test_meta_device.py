"""Weights that are built on the meta device and divided before they have memory: the values are those of a
model that was built whole, and no rank holds more than its part."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.setup import build_training
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.training.step import initialize


def cell(initialize: str, **changes: Any) -> Cell:
    settings = {
        "model": "tnl-tiny",
        "strategy": "lasp",
        "sizes": {"dp": 3},
        "batch": 3,
        "seq_len": 24,
        "precision": "bf16",
        "training": {"backend": "zero3", "initialize": initialize},
    }
    return Cell.model_validate(settings | changes)


def values_of_rank(mesh: DeviceMesh, asked: Cell) -> dict[str, Tensor]:
    """What a rank holds of weights and buffers after set-up."""
    training, _, _ = build_training(asked, mesh, partial(initialize, seed=5, everything=True))
    parts = {name: part.values for name, part in training.backend.weight_parts().items()}
    return parts | dict(training.module.named_buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {},  # uneven parts, buffers, vectors with values of their own
        {
            "strategy": "tensor_parallel",
            "model": "bert-tiny",
            "sizes": {"dp": 2, "tp": 2},
            "batch": 4,
        },  # tied
    ],
)
def test_values_are_those_of_a_model_that_was_built_whole(pool: RankPool, changes: dict[str, Any]) -> None:
    by_device = {
        device: pool.run(cell(device, **changes).mesh_sizes, values_of_rank, cell(device, **changes))
        for device in ("meta", "device")
    }
    for meta, whole in zip(by_device["meta"], by_device["device"], strict=True):
        assert meta.keys() == whole.keys()
        assert any(x.any() for x in meta.values())
        for name, x in whole.items():
            assert torch.equal(meta[name], x), name


def test_a_rank_never_holds_more_than_its_part() -> None:
    model = {"model": "gpt3-345m", "model_options": {"layers": 2}, "strategy": "single", "sizes": {"dp": 8}}
    asked = [cell(on, **model, batch=8, seq_len=1024) for on in ("meta", "device")]
    logs = [tracing.trace(each).memory for each in asked]
    meta, device = (log.levels(log.sizes).setup.nbytes for log in logs)
    # float32 weights and two moments, of an eighth; the rest is the batch
    assert meta == pytest.approx(12 * model_parameters(asked[0]) / 8, rel=0.01)
    assert device > 4 * model_parameters(asked[0])
    assert logs[0].peak() == logs[1].peak()  # the steps' own is the same


def test_a_place_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="initialize is one of meta, device, not 'cpu'"):
        tracing.trace(cell("cpu"))
