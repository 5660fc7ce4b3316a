"""Models: sizes as published, closed forms as built.

Verification's oracle runs without any option that changes how, and not what, a model computes.

Options of causal transformers that families of published models need: head size, shares of RoPE, parallel
residuals, and what they ask of strategies.

A kind of feed-forward block that a model brings, as the example of plug-ins does.

One attention call: what it holds, what refuses it, and what bounds its time.
Hybrids: patterns of layers, their presets, and what is refused.
Models on grids: sizes as published, closed forms as built, and the loss that a diffusion step learns."""

import gc
import importlib.util
import math
import weakref
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.composition import Stage
from spbench.impls.layout import Unsupported
from spbench.impls.models.bert import BertModel
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.grid_blocks import GridModel
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recurrent_mixer import GatedDeltaNet, Mamba2, RecurrentMixer
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention, SoftmaxAttentionMixer
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.hybrid import HybridModel
from spbench.impls.models.model import Model
from spbench.impls.place import Place
from spbench.impls.registries import all_models, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import default_dtype, initialize
from tests.cells import make_cell
from tests.grid import data
from tests.plugins.additions import EXAMPLES


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


def test_presets_are_not_changed_by_options() -> None:
    before = all_models()["bert-base"]
    assert model_preset("bert-base", {"layers": 1}) == replace(before, layers=1)  # type: ignore[type-var]
    assert all_models()["bert-base"] is before


#: options that change what a model computes: sizes, layers, functions
WHAT = {
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "head_size", "inner", "channels", "patch"),
    *("vocabulary", "vocabulary_multiple", "max_positions", "token_types", "text_hidden", "text_tokens"),
    *("time_features", "temporal", "leading", "key_size", "value_size", "state_heads", "state_key_heads"),
    *("convolution", "pattern", "softmax_every", "kind", "window", "sinks", "documents", "documents_seed"),
    *("norm", "norm_epsilon", "pre_norm", "embedding_norm", "qk_norm", "attention_norm", "output_gate"),
    *("norms", "embedding_scaled", "logit_cap", "qk_norm_over", "window_rotary_base", "documents_multiple"),
    *("mlp", "biases", "qkv_bias", "parallel_residual", "position", "rotary_base", "rotary_share"),
    *("tied", "binary_head", "linformer", "mtp_layers", "mtp_weight", "packed_multiple"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "latent_norms"),
    *("index_n_heads", "index_head_dim", "index_topk"),
    *("lora_rank", "lora_alpha", "lora_targets", "lora_whole", "lora_dropout", "frozen_bits"),
    *("experts", "experts_per_token", "expert_inner", "shared_inner", "shared_gate", "dense_layers"),
    *("expert_pattern", "expert_biases", "expert_weighting", "router", "router_scores", "router_normalized"),
    *("router_scale", "router_groups", "router_group_topk", "router_bias", "router_linear_bias"),
    *("rule", "csa_block", "hca_block", "output_groups", "output_rank"),
    *("router_dtype", "aux_loss", "aux_weight", "z_weight", "capacity", "capacity_padded", "routing"),
}
#: options that change how, which the oracle may keep, with the reason
HARMLESS = data(__file__)["HARMLESS"]
#: options of one model
KEPT = {
    ("BertModel", "dropout"): "verification runs without dropout",
    ("AttentionCallModel", "attention"): "decides by which rate the call is timed, not what runs",
}


def test_every_option_is_plain_in_the_oracle_or_said_to_change_what_is_computed() -> None:
    missing = [
        f"{type(model).__name__}.{field.name}"
        for model in all_models().values()
        for field in fields(model)
        if field.name not in {*model.plain_options, *WHAT, *HARMLESS}
        and (type(model).__name__, field.name) not in KEPT
    ]
    assert missing == []


def test_the_lists_name_options_that_exist() -> None:
    names = {field.name for model in all_models().values() for field in fields(model)}
    assert {*WHAT, *HARMLESS} <= names
    assert not {*WHAT} & {*HARMLESS}


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


def test_a_model_counts_the_parameters_of_its_own_blocks() -> None:
    spec = importlib.util.spec_from_file_location("two_step_lm", EXAMPLES / "two_step_lm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.PRESETS["two-step-lm-tiny"]
    with torch.device("meta"):
        built = model.build(Strategy(), 24)
    counts = model.parameters(model.padded_vocabulary(1))
    assert counts["elements"] == sum(p.numel() for p in built.parameters())
    assert counts["mlp"] == 2 * 4 * 48 * 96


LENGTH = 65_536


call = partial(
    make_cell,
    *("attention-call", "ulysses+ring_attention", {}, 1, LENGTH),
    cluster="a100-sxm-80gb",
    training={"step": "inference"},
)


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
    assert contiguous.step_time_s / zigzag.step_time_s == pytest.approx(7.5 / 4, rel=0.03)


def test_inputs_are_drawn_by_heads() -> None:
    inputs = model_preset("attention-call", {"head_size": 4}).inputs(2, 3, torch.Generator().manual_seed(0))
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "q": [2, 3, 32, 4],
        "k": [2, 3, 8, 4],
        "v": [2, 3, 8, 4],
    }


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


def grid_model(name: str, **options: Any) -> GridModel:
    model = model_preset(name, options)
    assert isinstance(model, GridModel)
    return model


def parameters_of_grid(model: GridModel, seq_len: int) -> int:
    with FakeTensorMode():
        return sum(p.numel() for p in model.build(Strategy(), seq_len).parameters())


def drawn(model: GridModel, deviation: float) -> torch.nn.Module:
    module = model.build(Strategy(), 24)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=deviation)
    return module


@pytest.mark.parametrize(("name", "published"), [("st-dit-xl", 720e6), ("st-dit-3b", 3e9)])
def test_size_of_a_grid_model_as_published(name: str, published: float) -> None:
    """arXiv 2403.10266, section 5: 720M and 3B; Open-Sora's log of the first: 724M."""
    assert parameters_of_grid(grid_model(name), 16 * 1024) == pytest.approx(published, rel=0.06)


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
