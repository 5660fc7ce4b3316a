"""Models: sizes as published, closed forms as built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.impls.models.bert import BertModel
from spbench.impls.models.model import Model, model_preset, models
from spbench.impls.strategies.base import Strategy

TINY = "causal-transformer-tiny"


def built_parameters(model: Model, seq_len: int) -> dict[str, int]:
    with FakeTensorMode():
        return {name: p.numel() for name, p in model.build(Strategy(), seq_len).named_parameters()}


def bert(name: str, **options: Any) -> BertModel:
    model = model_preset(name, options)
    assert isinstance(model, BertModel)
    return model


@pytest.mark.parametrize(("name", "published"), [("bert-base", 110e6), ("bert-large", 340e6)])
def test_size_as_published(name: str, published: float) -> None:
    """Devlin et al., section 3: 110M and 340M."""
    assert sum(built_parameters(bert(name), 512).values()) == pytest.approx(published, rel=0.02)


def test_base_as_its_authors_released_it() -> None:
    """BertForPreTraining of the released bert-base-uncased: 110,106,428 parameters, decoder tied."""
    exact = bert("bert-base", vocabulary_multiple=1)
    assert sum(built_parameters(exact, 512).values()) == 110_106_428


def test_vocabulary_is_padded_as_megatron_pads_it() -> None:
    model = bert("bert-base")
    assert [model.padded_vocabulary(n) for n in (1, 2, 4, 8, 64)] == [30592, 30720, 30720, 30720, 32768]
    assert all(model.padded_vocabulary(n) % (128 * n) == 0 for n in range(1, 65))


@pytest.mark.parametrize("name", ["bert-tiny", "st-dit-tiny", "transformer-3d-tiny", "tnl-tiny"])
def test_data_depend_on_the_seed_alone(name: str) -> None:
    model = model_preset(name)
    first, again = (model.inputs(5, 24, torch.Generator().manual_seed(2)) for _ in range(2))
    assert set(first) <= set(model.sequence_dims)  # which has those of several predicted tokens too
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_data_of_bert() -> None:
    model = bert("bert-tiny")
    first = model.inputs(5, 40, torch.Generator().manual_seed(2))
    assert first["loss_weights"].sum().item() == pytest.approx(1)
    assert not first["loss_weights"][first["padding"] > 0].any()  # no loss of padded positions
    assert int(first["tokens"].max()) < model.vocabulary
    assert first["padding"].sum(1).tolist() == [5] * 5


def test_loss_of_an_untrained_model_is_that_of_guessing() -> None:
    model = bert("bert-tiny")
    module = model.build(Strategy(), 24)
    for p in module.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1e-4)
    loss = module(model.inputs(4, 24, torch.Generator().manual_seed(0)))["loss"].item()
    assert loss == pytest.approx(torch.tensor([96.0, 2.0]).log().sum().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [("bert-tiny", {}), ("bert-tiny", {"mask_shape": "square"}), ("bert-tiny-linformer", {})],
)
def test_padding_is_never_attended_and_all_else_is(name: str, options: dict[str, Any]) -> None:
    model = bert(name, **options)
    module = model.build(Strategy(), 24)
    for p in module.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    inputs = model.inputs(2, 24, torch.Generator().manual_seed(0))
    padded = inputs["padding"] > 0

    def hidden(changed: torch.Tensor) -> torch.Tensor:
        tokens = torch.where(changed, (inputs["tokens"] + 7) % 96, inputs["tokens"])
        of: torch.Tensor = module(inputs | {"tokens": tokens})["hidden"]
        return of

    before, after = hidden(torch.zeros_like(padded)), hidden(padded)
    assert torch.equal(before[~padded], after[~padded])
    assert not torch.equal(before[padded], after[padded])
    first = torch.zeros_like(padded).index_fill(1, torch.tensor(0), True)
    assert (before != hidden(first)).any(-1)[~padded].all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert-base", {"heads": 5}, "hidden 768 is not divisible by heads 5"),
        ("st-dit-xl", {"heads": 5}, "hidden 1152 is not divisible by heads 5"),
        ("bert-base", {"softmax": "sparse"}, "softmax is one of fused, plain, megatron"),
        ("bert-base", {"mask_shape": "round"}, "mask_shape is one of keys, square"),
        ("bert-base", {"linformer": 8, "mask_shape": "square"}, "Linformer"),
        *(("tnl-1b", {"kv_heads": n}, f"kv_heads {n} does not divide heads 16") for n in (3, 0, 32)),
        ("tnl-1b", {"kv_heads": 4}, "kv_heads needs softmax attention, which no layer of this model has"),
        ("tnl-1b", {"qk_norm": True}, "qk_norm needs softmax attention, which no layer of this model has"),
        ("tnl-1b", {"heads": 5}, "hidden 2048 is not divisible by heads 5"),
        ("tnl-1b", {"attention_norm": "layer"}, "attention_norm is one of hidden, head"),
        ("tnl-1b", {"cross_entropy": True}, "cross_entropy is one of plain, fused"),
        (TINY, {"rotary_share": 0.25}, "RoPE turns pairs, but rotary_share 0.25 of a head's 4 features"),
        (TINY, {"rotary_share": 1.5}, "rotary_share is above 0 and at most 1, not 1.5"),
        (TINY, {"head_dim": 0}, "head_dim is at least 1, not 0"),
    ],
)
def test_impossible_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_preset(name, options)


def test_unknown_names() -> None:
    with pytest.raises(KeyError, match="bert-base"):
        model_preset("bart")
    with pytest.raises(KeyError, match="layers"):
        model_preset("bert-base", {"depth": 3})


def test_presets_are_not_changed_by_options() -> None:
    before = models()["bert-base"]
    assert model_preset("bert-base", {"layers": 1}) == replace(before, layers=1)  # type: ignore[type-var]
    assert models()["bert-base"] is before
