"""Options of causal transformers that families of published models need: head size, shares of RoPE, parallel
residuals, and what they ask of strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttentionMixer
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype, initialize


def tiny(**options: Any) -> CausalTransformerModel:
    return CausalTransformerModel(**{**TINY_SIZES, **options})


def block(model: CausalTransformerModel) -> tuple[DecoderBlock, torch.Tensor, Places]:
    with default_dtype(torch.float64):
        module = DecoderBlock(model, Strategy(), 0)
        initialize(module, 0)
        x = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(1))
    return module, x, Places(Strategy(), 6, x)


def test_a_parallel_residual_gives_attention_and_mlp_the_same_input() -> None:
    module, x, places = block(tiny(parallel_residual=True))
    mixed, inner = module.mixer(module.mixer_norm(x), places), module.mlp(module.mlp_norm(x))
    torch.testing.assert_close(module(x, places), x + mixed + inner, rtol=1e-12, atol=1e-12)
    module.parallel = False
    assert not torch.allclose(module(x, places), x + mixed + inner)


@pytest.mark.parametrize("library", ["torch", "megatron-local"])
def test_a_share_of_rope_turns_the_first_features_alone(library: str) -> None:
    model = tiny(rotary_share=0.5, head_dim=8, library=library)
    module, _, places = block(model)
    mixer = module.mixer
    assert isinstance(mixer, SoftmaxAttentionMixer)
    q = torch.randn(2, 12, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turned = mixer.turned(q, places)
    assert torch.equal(turned[..., 4:], q[..., 4:])
    # of 4 features as a head of 4 has them; position 0 is not turned
    torch.testing.assert_close(turned[..., 0, :], q[..., 0, :])
    assert not torch.allclose(turned[..., 1:, :4], q[..., 1:, :4])
    torch.testing.assert_close(turned[..., :4].norm(dim=-1), q[..., :4].norm(dim=-1))


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("tensor_parallel", {"tp": 4}), ("megatron_sp", {"tp": 4}), ("ulysses", {"sp": 4})],
)
def test_wide_heads_send_what_the_closed_form_says(strategy: str, sizes: dict[str, int]) -> None:
    of: Any = {"sizes": sizes, "batch": 2, "seq_len": 24, "model_options": {"head_dim": 8}}
    cell = Cell.model_validate({"model": "causal-transformer-tiny-gqa", "strategy": strategy, **of})
    measured = VirtualEngine().measure(cell)
    assert measured.status == "ok", measured.reason
    assert measured.formula_difference == []
    assert measured.communication
