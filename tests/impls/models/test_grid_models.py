"""Models on grids: sizes as published, closed forms as built, and the loss that a diffusion step learns."""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.impls.composition import Stage
from spbench.impls.models.blocks.grid_blocks import GridModel
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy, Unsupported


def grid_model(name: str, **options: Any) -> GridModel:
    model = model_preset(name, options)
    assert isinstance(model, GridModel)
    return model


def built_parameters(model: GridModel, seq_len: int) -> int:
    with FakeTensorMode():
        return sum(p.numel() for p in model.build(Strategy(), seq_len).parameters())


def drawn(model: GridModel, deviation: float) -> torch.nn.Module:
    module = model.build(Strategy(), 24)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=deviation)
    return module


@pytest.mark.parametrize(("name", "published"), [("st-dit-xl", 720e6), ("st-dit-3b", 3e9)])
def test_size_as_published(name: str, published: float) -> None:
    """arXiv 2403.10266, section 5: 720M and 3B; Open-Sora's log of the first: 724M."""
    assert built_parameters(grid_model(name), 16 * 1024) == pytest.approx(published, rel=0.06)


def test_a_token_is_a_patch() -> None:
    """A frame of 32 x 32 latent positions is 256 tokens of 2 x 2."""
    model = grid_model("st-dit-xl", temporal=16)
    assert model.sizes(16 * 32 * 32) == (16, 256)
    with pytest.raises(Unsupported, match=r"16400 positions .* 16 times patches of 4; use 16384 or 16448"):
        model.sizes(16400)


@pytest.mark.parametrize("name", ["st-dit-tiny", "transformer-3d-tiny"])
def test_loss(name: str) -> None:
    """The loss is the mean square error of the noise, whatever the parts that it is summed from."""
    model = grid_model(name)
    first = model.inputs(5, 24, torch.Generator().manual_seed(2))
    module = drawn(model, 0.1)
    with torch.no_grad():
        found = module(first)
    expected = torch.nn.functional.mse_loss(found["predicted"], first["noise"])
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found["token_loss"].shape == first["noise"].shape[:-1]


@pytest.mark.parametrize("name", ["st-dit-tiny", "transformer-3d-tiny"])
def test_every_position_matters_to_every_other(name: str) -> None:
    """Two layers along all dims in turn spread a change of one position over the grid."""
    model = grid_model(name)
    module = drawn(model, 0.3)
    inputs = model.inputs(1, 24, torch.Generator().manual_seed(0))
    changed = {**inputs, "noisy": inputs["noisy"].clone()}
    changed["noisy"].view(24, -1)[7] += 1
    with torch.no_grad():
        before, after = (module(batch)["predicted"].view(24, -1) for batch in (inputs, changed))
    assert (before != after).any(-1).all()


def test_the_text_and_the_time_matter() -> None:
    model = grid_model("st-dit-tiny")
    module = drawn(model, 0.3)
    inputs = model.inputs(2, 24, torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = module(inputs)["predicted"]
        for name in ("text", "time_steps"):
            shift = torch.tensor([1, 0]).view(2, *[1] * (inputs[name].ndim - 1))
            other = {**inputs, name: inputs[name] + shift}
            after = module(other)["predicted"]
            assert not torch.equal(before[0], after[0])
            assert torch.equal(before[1], after[1])  # of another sample


@pytest.mark.parametrize("name", ["st-dit-xl", "st-dit-tiny", "transformer-2d", "transformer-3d-tiny"])
def test_tokens_are_the_patches(name: str) -> None:
    """As many as rows of what the blocks compute with, not as positions of the latent."""
    model = model_preset(name, {"layers": 1})
    assert isinstance(model, GridModel)
    length = 24 * model.patch * math.prod(model.leading)
    with torch.device("meta"):
        inputs = model.inputs(3, length, None)
    assert model.tokens(3, length) == inputs["noisy"].numel() // model.token_channels
    assert model.tokens(3, length) * model.patch == 3 * length
    assert model_preset("bert-tiny").tokens(3, length) == 3 * length


@pytest.mark.parametrize("name", ["st-dit-tiny", "transformer-3d-tiny"])
def test_there_are_no_pipeline_stages(name: str) -> None:
    stage, model = Stage(0, 2), model_preset(name)
    for ask in (lambda: model.build(Strategy(), 24, stage), lambda: model.sites(1, 24, 1, stage)):
        with pytest.raises(Unsupported, match="has no pipeline stages; use pp 1"):
            ask()


def test_each_block_has_the_two_stages_that_are_planned_for_it() -> None:
    model = grid_model("st-dit-tiny", layers=4)
    module: Any = model.build(Strategy(), 24)
    plan = model.plan(Strategy(), 24)  # type: ignore[attr-defined]
    assert [block.planned for block in module.blocks.values()] == [plan[i : i + 2] for i in (0, 2, 4, 6)]
