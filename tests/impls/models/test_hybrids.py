"""Hybrids: patterns of layers, their presets, and what is refused."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.recurrent_mixer import GatedDeltaNet, Mamba2, RecurrentMixer
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.hybrid import HybridModel
from spbench.impls.models.model import model_preset
from spbench.impls.place import Place
from spbench.impls.strategies.nesting import nesting

KINDS = {GatedDeltaNet: "G", LinearAttention: "L", Mamba2: "M", SoftmaxAttention: "S"}


def spelled(model: HybridModel) -> str:
    layers = range(model.layers)
    return "".join(KINDS[type(model.mixing(i))] + "-" * (model.feeding(i) is not None) for i in layers)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("qwen3-next-dense", "G-G-G-S-" * 12),
        ("minimax-01-dense", "L-L-L-L-L-L-L-S-" * 10),
        ("nemotron-h-8b", "M-M-M-MS-" + "M-M-M-M-MS-" * 3 + "M-M-M-M-M-"),
    ],
)
def test_the_layers_of_presets(name: str, pattern: str) -> None:
    model = model_preset(name)
    assert isinstance(model, HybridModel)
    assert spelled(model) == pattern
    small = model.shrunk()
    assert {*spelled(small)} - {"-"} == {*pattern} - {"-"}


def test_softmax_layers_alone_have_a_gate() -> None:
    model = model_preset("qwen3-next-dense")
    assert isinstance(model, HybridModel)
    (softmax,) = {model.mixing(i) for i in range(3, 48, 4)}
    assert isinstance(softmax, SoftmaxAttention)
    assert softmax.gated
    assert model_preset("qwen3-next-dense", {"output_gate": False}) != model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": ""}, "pattern has letters of S"),
        ({"pattern": "GX"}, r"G \(Gated DeltaNet\), M \(Mamba-2\), each with -, E or neither, not 'GX'"),
        ({"pattern": "G--S"}, "not 'G--S'"),
        ({"pattern": "-G"}, "not '-G'"),
        ({"pattern": "S", "autotune_states_kib": 1}, "autotune_states_kib needs a layer of G or M"),
        ({"recurrence": "fast"}, "recurrence is one of chunked, sequential, not 'fast'"),
        ({"state_key_heads": 5}, "key_heads 5 does not divide heads 12 of a recurrence"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_preset("gated-deltanet-tiny", options)


def test_inputs_of_convolutions_die_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backward does not need them, as in a layer that is recomputed, gates are made without them."""
    module = model_preset("gated-deltanet-tiny").build(nesting("single").configured(Place.of_rank({}, 0)), 16)
    mixer = next(each for each in module.modules() if isinstance(each, RecurrentMixer))
    projected: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def noted(_: Any, __: Any, outputs: list[Tensor]) -> None:
        projected.extend(weakref.ref(x) for x in outputs[:3])

    def of_recurrence(*given: Tensor) -> Any:
        alive.append(sum(each() is not None for each in projected))
        return type(mixer).of_recurrence(mixer, *given)

    mixer.project.register_forward_hook(noted)
    monkeypatch.setattr(mixer, "of_recurrence", of_recurrence)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    gc.disable()
    try:
        with torch.no_grad():
            module({"tokens": tokens, "labels": tokens, "loss_weights": torch.ones(1, 16)})
    finally:
        gc.enable()
    assert len(projected) == 3
    assert alive == [0]
