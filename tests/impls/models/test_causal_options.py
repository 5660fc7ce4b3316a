"""Options of causal transformers that families of published models need: head size, shares of RoPE, parallel
residuals, and what they ask of strategies.

A kind of feed-forward block that a model brings, as the example of plug-ins does.

One attention call: what it holds, what refuses it, and what bounds its time.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.layout import Unsupported
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttentionMixer
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype, initialize
from tests.plugins.additions import EXAMPLES


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


def test_a_model_counts_the_parameters_of_its_own_blocks() -> None:
    spec = importlib.util.spec_from_file_location("two_step_lm", EXAMPLES / "two_step_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.PRESETS["two-step-lm-tiny"]
    with torch.device("meta"):
        built = model.build(Strategy(), 24)
    counts = model.parameters(model.padded_vocabulary(1))
    assert counts["elements"] == sum(p.numel() for p in built.parameters())
    assert counts["mlp"] == 2 * 4 * 48 * 96


LENGTH = 65_536


def call(**settings: Any) -> Cell:
    content: dict[str, Any] = {
        "model": "attention-call",
        "strategy": "ulysses+ring_attention",
        "batch": 1,
        "seq_len": LENGTH,
        "precision": "bf16",
        "cluster": "a100-sxm-80gb",
        "training": {"step": "inference"},
    }
    return Cell.model_validate(content | settings)


def test_a_rank_holds_its_heads_and_positions_in_the_precision_of_the_cell() -> None:
    measured = VirtualEngine().measure(call(sizes={"sp": 2, "cp": 4}))
    (by_class,) = {each["rank"]: each for each in measured.by_class or ()}.values()
    q_and_o, k_and_v = 2 * 32, 2 * 8
    assert by_class["allocated_bytes"] == LENGTH // 8 * (32 + k_and_v) * 128 * 2  # q, k and v alone
    assert measured.peak_memory_bytes > LENGTH // 8 * (q_and_o + k_and_v) * 128 * 2


def test_zigzag_halves_the_work_of_the_last_rank_of_a_ring() -> None:
    """Seven blocks and half of its own, or half of each of the eight; so long that little else counts."""
    contiguous, zigzag = (
        VirtualEngine().measure(
            call(sizes={"cp": 8}, seq_len=16 * LENGTH, strategy_options={"placement": placement})
        )
        for placement in ("contiguous", "zigzag")
    )
    assert contiguous.step_time_s is not None
    assert zigzag.step_time_s is not None
    assert contiguous.step_time_s / zigzag.step_time_s == pytest.approx(7.5 / 4, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"training": {}}, "attention-call has no weights to train; set training: {step: inference}"),
        (
            {"strategy": "tensor_parallel", "sizes": {"tp": 2}},
            "this model is given its heads",
        ),
        ({"strategy": "ulysses", "sizes": {"sp": 3}}, "32 attention heads cannot be split over 3 ranks"),
    ],
)
def test_what_cannot_run_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        plan(call(**{"seq_len": 3 * LENGTH} | settings))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="heads 32 are not divisible by kv_heads 5"):
        model_preset("attention-call", {"kv_heads": 5})
    with pytest.raises(ValueError, match="attention"):
        model_preset("attention-call", {"attention": "unfused"})


def test_inputs_are_drawn_by_heads() -> None:
    inputs = model_preset("attention-call", {"head_size": 4}).inputs(2, 3, torch.Generator().manual_seed(0))
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "q": [2, 3, 32, 4],
        "k": [2, 3, 8, 4],
        "v": [2, 3, 8, 4],
    }
