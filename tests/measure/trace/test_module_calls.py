"""In whose forward or backward storages are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.recorder import Recorder


class Layers(nn.Module):
    def __init__(self, *, again: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.again = nn.Tanh(), again

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2  # of no layer
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x).sum()


def recorded(*, again: bool) -> MemoryLog:
    with Recorder() as recorder, recorder.step(last=True):
        module = Layers(again=again)
        with recorder.phase("forward"):
            loss = module(torch.ones(3, 8))
        with recorder.phase("backward"):
            loss.backward()
    return recorder.memory.stop()


def made(log: MemoryLog, phase: str) -> list[str]:
    """The places of what is born in a phase, each run of one place once."""
    span = dict(log.spans())[phase]
    places = [log.place_names[log.places[event - 1]] for event in log.events[span] if event > 0]
    return [place for place, before in zip(places, [None, *places], strict=False) if place != before]


def test_forward_and_backward_are_told_by_module() -> None:
    log = recorded(again=False)
    assert len(log.places) == len(log.sizes)
    assert made(log, "forward")[1:] == ["Layers", "layers.*", "head", "Layers"]
    assert made(log, "backward")[:3] == ["", "head", "layers.*"]


def test_what_is_computed_again_is_of_the_same_module() -> None:
    again = recorded(again=True)
    births = [event - 1 for event in again.events[dict(again.spans())["backward"]] if event > 0]
    # a product and its sum with the bias, of each of two layers
    assert sum(again.place_names[again.places[number]] == "layers.*" for number in births) > sum(
        name == "layers.*" for name in made(recorded(again=False), "backward")
    )


@pytest.mark.slow
def test_short_cuts_have_the_places_of_plain_traces() -> None:
    cell = Cell(model="causal-transformer-tiny", strategy="ulysses", sizes={"sp": 2}, batch=4, seq_len=16)
    cell = cell.model_copy(update={"training": cell.training.model_copy(update={"micro_batches": 4})})
    quick = tracing.trace(cell, 0).memory
    with tracing.only_plain_traces():
        plain = tracing.trace(cell, 0).memory
    assert (quick.places, quick.place_names) == (plain.places, plain.place_names)
    assert "blocks.*.mlp" in quick.place_names
