"""Traces of deep models that were put together from shallow ones are those of models whose layers all run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import deep_models, trace_cache, tracing
from spbench.bench.measure.engines.deep_models import Effort
from spbench.bench.measure.engines.traces import Trace
from spbench.impls.models.blocks.decoder_module import Decoder
from spbench.impls.models.model import model_preset, models
from spbench.impls.registries import backends, strategies
from tests.measure.engines.cells import supported
from tests.measure.trace.same_traces import differences
from tests.measure.trace.shortened_loops import cell

#: layers of the tiny models, for each layer of their period
LAYERS = 7
TINY = [name for name in models() if "-tiny" in name and name != "attention-call-tiny"]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for effort in deep_models.LEAST:
        monkeypatch.setitem(deep_models.LEAST, effort, LAYERS)


class Traced:
    """Traces, and how many layers the traced models had."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        traced = tracing._traced

        def counting(asked: Cell, rank: int, events: bool) -> Trace:
            self.layers.append(asked.model_options["layers"])
            return traced(asked, rank, events)

        with monkeypatch.context() as patched:
            patched.setattr(tracing, "_traced", counting)
            yield


def check(
    asked: Cell,
    monkeypatch: pytest.MonkeyPatch,
    rank: int = 0,
    *,
    events: bool = True,
    effort: Effort = "proved",
) -> list[int]:
    """Compare a trace with that of all layers; returns how many layers the traced models had."""
    traced = Traced()
    with traced.counted(monkeypatch):
        ours = tracing.trace(asked, rank, events=events, effort=effort)
    theirs = tracing.trace(asked, rank, events=events, effort="whole")
    assert differences(ours, theirs) == []
    assert (ours.cell, ours.rank, ours.found) == (theirs.cell, theirs.rank, theirs.found)
    assert vars(ours.communication) == vars(theirs.communication)
    return traced.layers


def deep(strategy: str, model: str = "causal-transformer-tiny", **changes: Any) -> Cell:
    options = {"layers": LAYERS, **changes.pop("model_options", {})}
    return cell(strategy, model, options, **{"training": {"backend": "zero3"}, **changes})


FEW = [3, 5, 4]
FULL = {"recompute": "full"}
CASES = {
    "ring": (deep("ring_attention", sizes={"sp": 8}, model_options=FULL), FEW),
    # a bucket of all gradients, which may be full in a deeper model
    "buckets": (deep("single", training={"backend": "ddp"}), [3, 5, LAYERS]),
}
OPTIONS = {
    # two kinds of layers; two steps of two micro-batches
    "hybrid": (
        deep(
            "lasp2h",
            "linear-llama3-tiny-hybrid",
            sizes={"sp": 2, "dp": 2},
            batch=8,
            model_options={"layers": 2 * LAYERS},
            training={"backend": "zero2", "micro_batches": 2, "steps": 2, "moments": "later"},
        ),
        [2 * layers for layers in FEW],
    ),
    "inference": (deep("ring_attention", training={"step": "inference"}), FEW),
    "a layer left over": (
        deep("ulysses", model_options={**FULL, "recompute_layers": 2, "layers": 2 * LAYERS + 1}),
        [7, 11, 9],
    ),
    "first layers alone": (
        deep(
            "ulysses",
            model_options={**FULL, "recompute_layers": 2, "recompute_method": "block", "layers": 2 * LAYERS},
        ),
        [6, 10, 8],
    ),
    "host": (deep("fpdt", model_options={**FULL, "checkpoints": "host"}), FEW),
    "optimizer on the host": (
        deep("ulysses", training={"backend": "zero3", "optimizer": "host"}),
        [3, 5, LAYERS],
    ),
    "tiles": (deep("ulysses", model_options={**FULL, "mlp_tile": 7, "loss_tile": 5}), FEW),
    "micro-batches": (
        deep("ring_attention", batch=16, training={"backend": "zero3", "micro_batches": 8}),
        FEW,
    ),
    "prefetch": (deep("ulysses", training={"backend": "zero3", "forward_prefetch": 1}), FEW),
    "uneven stages": (
        deep(
            "ulysses",
            sizes={"pp": 2, "sp": 2},
            model_options={"layers": 2 * LAYERS + 1},
            training={"backend": "ddp", "stage_layers": [LAYERS, LAYERS + 1]},
        ),
        [2 * LAYERS + 1],
    ),
    # one buffer, which is all that grows
    "main gradients": (deep("ulysses", training={"backend": "megatron"}), FEW),
    "buckets of Megatron": (
        deep(
            "ulysses",
            training={"backend": "megatron", "overlap_grad_reduce": True, "bucket_size": 10_000},
        ),
        FEW,
    ),
    "one buffer for forward and backward": (deep("ulysses", training={"backend": "fsdp1"}), [LAYERS]),
}


@pytest.mark.parametrize(
    ("asked", "layers"),
    [pytest.param(*case, id=name) for name, case in CASES.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in OPTIONS.items()],
)
def test_traces_are_as_if_all_layers_were_traced(
    asked: Cell, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(asked, monkeypatch, asked.sizes.world // 2) == layers


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_and_backend(strategy: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        deep(strategy, name, training={"backend": backend}, model_options={"layers": LAYERS * period})
        for name in TINY
        if (period := model_preset(name).period)
    ]
    one = next((each for each in asked if supported(each)), None)
    if one is None:
        pytest.skip(f"no tiny model runs on {strategy} with {backend}")
    check(one, monkeypatch, one.sizes.world // 2)


@pytest.mark.slow
def test_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(deep("single"), monkeypatch, events=False) == FEW


@pytest.mark.parametrize(
    ("vocabulary", "layers"), [(65536, FEW), (7168, [LAYERS])], ids=["small parts", "large parts"]
)
def test_shards_of_all_weights(vocabulary: int, layers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the weights is a part of the embedding; of a small one in models of up to 5 layers
    alone, which their traces do not show."""
    options = {"hidden": 4096, "vocabulary": vocabulary}
    asked = deep("ulysses", model_options=options, training={"backend": "zero1"})
    assert check(asked, monkeypatch) == layers


def test_a_guess_is_put_together_without_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = deep("ulysses", model_options=FULL)
    assert check(asked, monkeypatch, effort="guess") == FEW[:2]


def test_a_layer_unlike_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the model alone that is the proof."""
    forward = Decoder.forward

    def other(self: Decoder, *args: Any) -> Any:
        if len(self.blocks) == 4:
            torch.empty(1)
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", other)
    assert check(deep("single"), monkeypatch) == [*FEW, LAYERS]


def test_the_plain_path_traces_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Traced()
    with traced.counted(monkeypatch), tracing.only_plain_traces():
        tracing.trace(deep("single"))
    assert traced.layers == [LAYERS]


def test_a_trace_on_disk_is_of_few_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of yet another depth is put together from the same ones."""
    monkeypatch.setenv("SPBENCH_CACHE", str(tmp_path))
    traced = Traced()
    with traced.counted(monkeypatch), trace_cache.used():
        for layers in (LAYERS, LAYERS + 1):
            ours = tracing.trace(deep("single", model_options={"layers": layers}))
            assert ours.cell.model_options["layers"] == layers
    assert traced.layers == FEW
