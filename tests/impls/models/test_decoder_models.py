"""Causal language models: sizes as published, closed forms as built, no look ahead.

What a step of causal language models sends and holds, and what its backward keeps.
Latent attention and multi-token prediction: values, sizes, bytes, and what libraries keep."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.rotary import fused_rotary, keys_and_values, rotated, turned_queries
from spbench.impls.models.blocks.decoder import DecoderModel
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.decoder_module import shifted_inputs
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.text import SEP, causal_language_batches, corpus
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.linear_llama import LinearLlamaModel
from spbench.impls.models.tnl import decay_rates, slopes
from spbench.impls.registries import all_models, model_preset, strategy_class
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.grid import tabled
from tests.impls.models.test_fusions import kept_by_a_layer
from tests.measure.verify.assertions import assert_green
from tests.slow import slow

DECODERS = [name for name, model in all_models().items() if isinstance(model, DecoderModel)]
TINY = [name for name in DECODERS if "-tiny" in name]


#: of the presets of real sizes, one of each family is in every run
LARGE = [
    name for name in DECODERS if name not in {*TINY, "llama3-8b", "tnl-1b", "gpt3-7b", "linear-llama3-1b"}
]


def decoder(name: str, **options: Any) -> DecoderModel:
    model = model_preset(name, options)
    assert isinstance(model, DecoderModel)
    return model


def built(model: DecoderModel, deviation: float = 0.3, seq_len: int = 24) -> nn.Module:
    module = model.build(Strategy(), seq_len)
    initialize(module, 0, deviation=deviation)
    return module


def counted(model: DecoderModel, stage: Stage = ONE_STAGE, parts: int = 1) -> dict[str, int]:
    """The counts of a stage's parameters, with those that no step trains."""
    (site,) = (site for site in model.sites(1, 64, parts, stage) if site.kind == "parameters")
    untrained = [s for s in model.sites(1, 64, parts, stage) if s.kind == "frozen_parameters"]
    return {**site.dims, "elements": sum(s.dims["elements"] for s in (site, *untrained))}


@tabled(__file__, "size_is_in_the_name")
def test_size_is_in_the_name(name: str, published: float) -> None:
    assert counted(decoder(name))["elements"] == pytest.approx(published, rel=0.03)
    assert name != "llama3-8b" or counted(decoder(name))["elements"] == 8_030_261_248  # as released


def test_the_billion_of_linear_llama_is_in_its_layers() -> None:
    size = counted(decoder("linear-llama3-1b"))
    assert size["elements"] - size["vocabulary"] == pytest.approx(1.07e9, rel=0.01)
    assert size["vocabulary"] == 2 * 128256 * 2048


@pytest.mark.parametrize(
    ("name", "stages", "tied"),
    [
        *(
            slow(name, 1 + i % 2, i % 4 > 1) if name in LARGE else (name, 1 + i % 2, i % 4 > 1)
            for i, name in enumerate(DECODERS)
        ),
        *((name, 2, True) for name in TINY),
    ],
)
def test_closed_form_of_the_size(name: str, stages: int, tied: bool) -> None:
    model = decoder(name, tied=tied)
    if model.layers % stages:
        pytest.skip("one layer")
    for index in range(stages):
        stage = Stage(index, stages)
        with FakeTensorMode():
            whole = model.build(Strategy(), 64, stage)
            part = model.build(TensorParallel.planned(4), 64, stage)
        size = counted(model, stage)
        assert sum(p.numel() for p in whole.parameters()) == size["elements"]
        # two heads of keys and values are split over two of four ranks, and held twice
        held = TensorParallel.planned(4).held_elements(Site("parameters", 1, counted(model, stage, 4)))
        assert sum(p.numel() for p in part.parameters()) == held
        tables = [p.numel() for n, p in whole.named_parameters() if n.split(".")[0] in ("embedding", "head")]
        assert sum(tables) == size["vocabulary"]


@pytest.mark.parametrize("name", TINY)
def test_no_position_sees_a_later_one(name: str) -> None:
    model = decoder(name)
    module = built(model)
    inputs = model.inputs(2, 24, torch.Generator().manual_seed(0))
    changed = inputs["tokens"].clone()
    changed[:, 10] = (changed[:, 10] + 1) % model.vocabulary
    before, after = (module(inputs | {"tokens": t})["hidden"] for t in (inputs["tokens"], changed))
    # kernels may add up zeros in another order, so not bit by bit
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert all(not torch.allclose(before[:, i], after[:, i]) for i in (10, 11))


@pytest.mark.parametrize("name", TINY)
def test_loss_of_an_untrained_model_is_that_of_guessing(name: str) -> None:
    model = decoder(name)
    outputs = built(model, 1e-3)(model.inputs(4, 24, torch.Generator().manual_seed(0)))
    assert outputs["language_loss"].item() == pytest.approx(math.log(96), rel=1e-3)


# -- TransNormerLLM ------------------------------------------------------------------------------------


def test_slopes() -> None:
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(16)[:2] == [2**-0.5, 2**-1.0]
    # between powers of two: those of the one below, then every other one of the one above
    assert slopes(12) == slopes(8) + slopes(16)[0:8:2]


def test_decay_falls_by_layer() -> None:
    assert decay_rates(8, 0, 24) == pytest.approx([(1 + 1e-5) * s for s in slopes(8)])
    assert decay_rates(8, 23, 24) == pytest.approx([1e-5 * s for s in slopes(8)])
    assert decay_rates(4, 0, 1)[0] > 0
    middle = decoder("tnl-1b").mixing(5)
    assert isinstance(middle, LinearAttention)
    assert middle.decay == tuple(decay_rates(16, 5, 16))
    assert not middle.lrpe


def assert_of_distance_alone(scores: Tensor) -> None:
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance, -2, -1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal))


def test_rope_depends_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 3, 1, 8).double(), torch.randn(2, 3, 1, 8).double()
    cos, sin = Places(Strategy(), 9, q).rotary(8, 10_000.0)
    turned_q, turned_k = (rotated(x.expand(2, 3, 9, 8), cos, sin) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(2, 3, 9))
    scores = turned_q @ turned_k.mT
    assert_of_distance_alone(scores)
    assert not torch.allclose(scores[..., 0, 0], scores[..., 0, 1])


def test_lrpe_depends_on_the_distance_alone() -> None:
    q, k, theta = torch.randn(6, 1, 4).double(), torch.randn(6, 1, 4).double(), torch.rand(6, 4).double()
    cos, sin = Places(Strategy(), 9, q).turned(theta)  # [6, 9, 4]
    turned_q, turned_k = (torch.cat((x * cos, x * sin), -1) for x in (q, k))
    scores = turned_q @ turned_k.mT
    assert_of_distance_alone(scores)
    torch.testing.assert_close(scores[:, 3, 3], (q * k).sum((1, 2)))
    torch.testing.assert_close(scores[:, 5, 3], (q * k * (2 * theta).cos().unsqueeze(1)).sum((1, 2)))


def test_lrpe_on_the_first_layer_only() -> None:
    model = decoder("tnl-tiny")
    angles = {name: p for name, p in built(model).named_parameters() if "theta" in name}
    assert list(angles) == ["blocks.0.mixer.theta"]
    expected = 10_000 ** (-2 * torch.arange(48) / 48)
    torch.testing.assert_close(angles["blocks.0.mixer.theta"].detach(), expected)
    widths = {s.dims["D"]: s.count for s in model.sites(1, 64) if s.kind == "linear_attention"}
    assert widths == {8: 1, 4: 1}


# -- softmax attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "softmax"), [(None, []), (0, []), (4, [3, 7, 11, 15]), (1, [*range(16)])])
def test_hybrid_layers(every: int | None, softmax: list[int]) -> None:
    model = decoder("linear-llama3-1b", softmax_every=every)
    assert isinstance(model, LinearLlamaModel)
    assert [i for i in range(16) if isinstance(model.mixing(i), SoftmaxAttention)] == softmax


@pytest.mark.parametrize("kv_heads", [1, 4, 12])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_grouped_queries_and_norms_as_written_down(kv_heads: int, qk_norm: bool) -> None:
    """Section 2.2 of arXiv 2305.13245 and Qwen3's norms, with torch's operators and repeated keys."""
    model = decoder("causal-transformer-tiny", kv_heads=kv_heads, qk_norm=qk_norm, rms_norm="fused")
    mixer = model.mixing(0).build(model, Strategy()).double()
    initialize(mixer, 0, deviation=0.3, everything=True)
    weights = dict(mixer.named_parameters())
    x = torch.randn(3, 24, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if kv_heads < 12:
        groups = weights["project.weight"].split([12 // kv_heads * 4, 4, 4], 1)
        rows = [part.flatten(0, 1) for part in groups]
    else:
        rows = [*weights["project.weight"]]
    q, k, v = ((x @ part.mT).unflatten(-1, (-1, 4)).transpose(1, 2) for part in rows)
    if qk_norm:
        q, k = (F.rms_norm(y, (4,), weights[f"{name}_norm"], 0.1) for y, name in ((q, "q"), (k, "k")))
    turn = Places(Strategy(), 24, x).rotary(4, 10_000.0)
    q, k, v = (y.repeat_interleave(12 // y.shape[1], 1) for y in (rotated(q, *turn), rotated(k, *turn), v))
    scores = (q @ k.mT / 2).masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights["out.weight"].mT
    torch.testing.assert_close(mixer(x, Places(Strategy(), 24, x)), expected)


@pytest.mark.parametrize("norms", ["before", "behind", "around"])
def test_norms_stand_where_they_are_said(norms: str) -> None:
    model = decoder("causal-transformer-tiny", norms=norms, layers=1)
    block = DecoderBlock(model, Strategy(), 0).double()
    initialize(block, 0, deviation=0.3, everything=True)
    x = torch.randn(2, 24, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places, weights, expected = Places(Strategy(), 24, x), dict(block.named_parameters()), x
    for name, part in (("mixer", partial(block.mixer, places=places)), ("mlp", block.mlp)):
        y = expected
        if norms != "behind":
            y = F.rms_norm(y, (48,), weights[f"{name}_norm.weight"], 0.1)
        y = part(y)
        if norms != "before":
            y = F.rms_norm(y, (48,), weights[f"{name}_post_norm.weight"], 0.1)
        expected = expected + y
    torch.testing.assert_close(block(x, places), expected)
    assert counted(model)["elements"] == sum(p.numel() for p in built(model).parameters())


def test_one_norm_for_attention_and_mlp_beside_each_other() -> None:
    model = decoder("causal-transformer-tiny", norms="shared", parallel_residual=True, layers=1)
    block = DecoderBlock(model, Strategy(), 0).double()
    initialize(block, 0, deviation=0.3, everything=True)
    x = torch.randn(2, 24, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = Places(Strategy(), 24, x)
    y = F.rms_norm(x, (48,), dict(block.named_parameters())["mixer_norm.weight"], 0.1)
    torch.testing.assert_close(block(x, places), x + block.mixer(y, places) + block.mlp(y))
    assert counted(model)["elements"] == sum(p.numel() for p in built(model).parameters())
    with pytest.raises(ValueError, match="norms: shared needs parallel_residual"):
        decoder("causal-transformer-tiny", norms="shared")


@pytest.mark.parametrize("options", [{"embedding_scaled": True}, {"logit_cap": 0.5}])
def test_scaled_words_and_capped_logits_as_written_down(options: dict[str, Any]) -> None:
    model = decoder("causal-transformer-tiny", layers=1, tied=True, **options)
    module = built(model).double()
    inputs = model.inputs(2, 24, torch.Generator().manual_seed(0))
    words = module.embedding.weight
    x = F.embedding(inputs["tokens"], words) * (48**0.5 if model.embedding_scaled else 1)
    x = module.norm(module.blocks["0"](x, Places(Strategy(), 24, x)))
    logits = x @ words.mT
    logits = 0.5 * (logits / 0.5).tanh() if model.logit_cap else logits
    losses = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none")
    torch.testing.assert_close(module(inputs)["token_loss"].flatten(), losses)


def test_a_norm_over_all_heads_as_written_down() -> None:
    model = decoder("causal-transformer-tiny-gqa", qk_norm_over="all", position="none")
    mixer = model.mixing(0).build(model, Strategy()).double()
    initialize(mixer, 0, deviation=0.3, everything=True)
    weights = dict(mixer.named_parameters())
    x = torch.randn(3, 24, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [part.flatten(0, 1) for part in weights["project.weight"].split([12, 4, 4], 1)]
    q, k, v = (x @ part.mT for part in rows)
    q, k = (F.rms_norm(y, y.shape[-1:], weights[f"{n}_norm"], 0.1) for y, n in ((q, "q"), (k, "k")))
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    k, v = (y.repeat_interleave(3, 1) for y in (k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = expected.transpose(1, 2).flatten(2) @ weights["out.weight"].mT
    torch.testing.assert_close(mixer(x, Places(Strategy(), 24, x)), expected)


def test_angles_are_precise_in_half_precision() -> None:
    like = torch.zeros((), dtype=torch.bfloat16)
    cos, _ = Places(Strategy(), 5000, like).turned(torch.tensor([1.0]))
    exact = torch.arange(5000.0, dtype=torch.float64).cos()
    assert cos.dtype is torch.bfloat16
    assert (cos[:, 0].double() - exact).abs().max() < 2**-8


# -- options and data ----------------------------------------------------------------------------------


def test_real_text_follows_itself() -> None:
    batches = causal_language_batches(1024, 3, 40, seed=5)
    first, second = next(batches), next(batches)
    assert {"tokens", "labels"} <= set(first) <= set(decoder("tnl-mini").sequence_dims)
    assert torch.equal(first["tokens"][:, 1:], first["labels"][:, :-1])
    assert not torch.equal(first["tokens"], second["tokens"])
    again = next(causal_language_batches(1024, 3, 40, seed=5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["loss_weights"].sum().item() == pytest.approx(1)


def test_a_run_longer_than_the_text_starts_again() -> None:
    text = corpus(1024)
    length = sum(map(len, text.sentences)) + len(set(text.documents))
    tokens: Tensor = next(causal_language_batches(1024, 1, length + 7, seed=0))["tokens"][0]
    assert torch.equal(tokens[:7], tokens[length:])
    assert (tokens[:length] == SEP).sum() == len(set(text.documents))


def cell(model: str, **changes: Any) -> Cell:
    defaults = {"model": model, "strategy": "tensor_parallel", "batch": 2, "seq_len": 48}
    return Cell.model_validate(defaults | changes)


def bytes_a_token(model: str, **options: Any) -> float:
    """By which the peak grows with a position of a single sequence."""
    changes = {"strategy": "single", "batch": 1, "precision": "bf16", "model_options": options}
    peaks = [tracing.trace(cell(model, seq_len=n, **changes)).memory.peak() for n in (8192, 16384)]
    assert peaks[1].phase == "backward"
    return (peaks[1].nbytes - peaks[0].nbytes) / 8192


def test_what_a_layer_of_tnl_keeps() -> None:
    """In units of [B, L, H] in bfloat16: the layer's input and the normalised one; four projections; silu(q)
    and silu(k); the output of attention, its norm, that times the gate; two more after the residual; two
    projections and their product of 2.75 each; a float32 state [D, A] a head in 256 positions, here 1."""
    unit = 2 * 2048
    layer = bytes_a_token("tnl-1b", layers=3) - bytes_a_token("tnl-1b", layers=2)
    expected = 2 + 4 + 2 + 3 + 2 + 3 * 5632 / 2048 + 128 * 128 * 16 * 4 / 256 / unit
    statistics = 3 * 4 / unit  # of a norm a token each
    assert layer / unit == pytest.approx(expected + statistics, abs=1e-3)


def test_the_peak_holds_12_bytes_a_logit() -> None:
    """Log-softmax, its gradient and the gradient of the logits, each in float32, as fairseq's loss has it."""
    rows = 50272
    more = bytes_a_token("tnl-1b", layers=2, vocabulary=2 * rows) - bytes_a_token("tnl-1b", layers=2)
    assert more / rows == pytest.approx(12, abs=1e-3)


MODEL = "mla-tiny"
B, L = 2, 6


def latent(**options: Any) -> CausalTransformerModel:
    model = model_preset(MODEL, options)
    assert isinstance(model, CausalTransformerModel)
    return model


def built_model(model: CausalTransformerModel, stage: Stage | None = None) -> nn.Module:
    module = model.build(Strategy(), L, *([] if stage is None else [stage])).double()
    initialize(module, 0, deviation=0.3)
    return module


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)  # type: ignore[arg-type]


# -- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"padded_values": True}], ids=str)
def test_each_head_attends_by_its_own_features_and_the_key_that_all_share(options: dict[str, Any]) -> None:
    """The formulas of the paper (equations 1 to 11 of its appendix), head by head."""
    model = latent(**options)
    mixer, x = built_model(model).blocks["0"].mixer, torch.randn(B, L, model.hidden, dtype=torch.float64)  # type: ignore[index]
    places = Places(Strategy(), L, x)
    cos, sin = places.rotary(2, model.rotary_base)
    of_queries = x if mixer.q_down is None else normalised(x @ mixer.q_down.weight.mT, mixer.q_norm)
    both = x @ mixer.kv_down.weight.mT
    of_keys, shared = normalised(both[..., :10], mixer.kv_norm), rotated(both[..., 10:], cos, sin)
    heads = []
    for head in range(12):
        q = of_queries @ mixer.q_up.weight[0, 6 * head : 6 * head + 6].mT
        kv = of_keys @ mixer.kv_up.weight[0, 9 * head : 9 * head + 9].mT
        k, v = torch.cat((kv[..., :4], shared), -1), kv[..., 4:]
        q = torch.cat((q[..., :4], rotated(q[..., 4:], cos, sin)), -1)
        scores = q @ k.mT / 6**0.5
        heads.append(scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf).softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ mixer.out.weight.mT
    torch.testing.assert_close(mixer(x, places), expected)


def test_fused_rotary_is_that_of_the_parts() -> None:
    torch.manual_seed(0)
    heads, size, turned, value = 3, 4, 2, 5
    angles = torch.randn(L, 1, dtype=torch.float64).expand(L, 2).contiguous()
    q = torch.randn(B, L, heads * (size + turned), dtype=torch.float64, requires_grad=True)
    kv = torch.randn(B, L, heads * (size + value), dtype=torch.float64, requires_grad=True)
    shared = torch.randn(B, L, turned, dtype=torch.float64, requires_grad=True)

    def plain(q: Tensor, kv: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, kv = q.unflatten(-1, (heads, -1)), kv.unflatten(-1, (heads, -1))
        of_heads = fused_rotary(q[..., size:].transpose(1, 2), angles).transpose(1, 2)
        key = fused_rotary(shared, angles).unsqueeze(2).expand(-1, -1, heads, -1)
        k = torch.cat((kv[..., :size], key), -1)
        return torch.cat((q[..., :size], of_heads), -1), k, kv[..., size:]

    def fused(q: Tensor, kv: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned = turned_queries(q * 1, angles, heads)
        return turned.unflatten(-1, (heads, -1)), *keys_and_values(kv, shared, angles, heads, size)

    results = [f(q, kv, shared) for f in (plain, fused)]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    weights = [torch.randn_like(x) for x in results[0]]
    gradients = [torch.autograd.grad([*r], [q, kv, shared], weights) for r in results]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


# -- multi-token prediction ------------------------------------------------------------------------------


def test_tokens_of_predictions_are_shifted_and_end_with_their_document() -> None:
    tokens, weights = torch.arange(6).unsqueeze(0), torch.full((1, 6), 0.5)
    inputs = shifted_inputs(tokens, tokens + 1, weights, Attended((4, 2)), 2)
    assert inputs["mtp_tokens"][0].tolist() == [[1, 2], [2, 3], [3, 4], [4, 5], [5, 5], [5, 5]]
    assert inputs["mtp_labels"][0].tolist() == [[2, 3], [3, 4], [4, 5], [5, 6], [6, 6], [6, 6]]
    assert inputs["mtp_weights"][0, :, 0].tolist() == [0.5, 0.5, 0.5, 0, 0.5, 0]
    assert inputs["mtp_weights"][0, :, 1].tolist() == [0.5, 0.5, 0, 0, 0, 0]


def test_a_module_predicts_from_the_state_and_the_next_token() -> None:
    model = latent(mtp_layers=2, mtp_weight=0.6)
    module = built_model(model)
    inputs = model.inputs(B, L, torch.Generator().manual_seed(1))
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    outputs = module(inputs)
    x, total = outputs["hidden"], torch.zeros((), dtype=torch.float64)
    table = module.embedding.weight  # type: ignore[union-attr]
    for depth in (1, 2):
        part = module.blocks[str(1 + depth)]  # type: ignore[index]
        # the token after the next ``depth`` ones, from positions that have one
        embedded = F.embedding(inputs["tokens"].roll(-depth, 1), table)  # type: ignore[arg-type]
        both = torch.cat((normalised(embedded, part.token_norm), normalised(x, part.hidden_norm)), -1)
        x = part.block(both @ part.project.weight.mT, Places(Strategy(), L, x))
        logits = normalised(x, part.norm) @ module.head.mT  # type: ignore[operator]
        labels = inputs["labels"].roll(-depth, 1)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, L)
        total = total + losses[:, : L - depth].sum() / (B * L)
    torch.testing.assert_close(outputs["mtp_loss"], total * 0.6 / 2)
    torch.testing.assert_close(outputs["loss"], outputs["language_loss"] + outputs["mtp_loss"])


# -- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None, "mtp_layers": 2}, {"tied": True}], ids=str)
@pytest.mark.parametrize("stages", [1, 2])
def test_closed_forms_count_the_parameters(options: dict[str, Any], stages: int) -> None:
    model = latent(**options)
    for index in range(stages):
        stage = Stage(index, stages)
        (site,) = (s for s in model.sites(1, L, stage=stage) if s.kind == "parameters")
        assert site.dims["elements"] == sum(p.numel() for p in built_model(model, stage).parameters())


def test_a_strategy_that_knows_one_head_size_refuses() -> None:
    peer = strategy_class("torch_context_parallel").planned(2)
    with pytest.raises(Unsupported, match="has no values of another head size than keys"):
        peer.check(latent().sites(1, 24))
    peer.check(latent(padded_values=True).sites(1, 24))


def test_bytes_of_a_ring_are_those_of_keys_and_of_values() -> None:
    site = Site("causal_attention", 1, {"B": 1, "L": 8, "Z": 12, "A": 5, "D": 6, "unlike_values": 1})
    forward, *_ = strategy_class("ring_attention").planned(2).communication([site], 2)
    assert forward.payload_bytes == 4 * 12 * (6 + 5) * 2
    gather, *_ = strategy_class("all_gather_kv").planned(2).communication([site], 2)
    assert gather.payload_bytes == 8 * 12 * (6 + 5) * 2


# -- on ranks --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "deepseek-v3", "moonlight-16b-a3b"])
@pytest.mark.parametrize(("strategy", "mesh"), [("megatron_sp", {"tp": 4}), ("ulysses", {"sp": 4, "ep": 2})])
def test_layers_of_published_models(pool: RankPool, preset: str, strategy: str, mesh: dict[str, int]) -> None:
    assert_green(pool, Case(strategy_class(strategy), model_preset(preset).shrunk(), "model"), mesh)


# -- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ["fused", "apart"])
def test_what_transformer_engine_keeps_of_latent_attention(rope: str) -> None:
    """Megatron-Core's multi_latent_attention.py: the norm's input and output, of each latent the same, then
    queries and keys of 192 features a head, values of 128, the output, and float32 numbers of norms and
    heads; fused RoPE turns queries in place."""
    h, heads, q_rank, kv_rank, inner = 512, 8, 96, 64, 256
    expected = 2 * 2 * h  # the layer's norm
    expected += 2 * 2 * (q_rank + kv_rank)
    expected += 2 * heads * (192 + 192 + 128 + 128) + 4 * heads
    expected += 2 * 2 * h + 6 * inner  # the MLP's norm, its products and what SwiGLU makes
    expected += 4 * 4  # four norms
    unfused = {"unfused": ["rope"]} if rope == "apart" else {}
    options = {
        "hidden": h,
        "heads": heads,
        "inner": inner,
        "kv_lora_rank": kv_rank,
        "q_lora_rank": q_rank,
        "library": "transformer-engine",
        "attention": "cudnn",
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mtp_layers": 0,
        **unfused,
    }
    up_again = {"recompute": "selective", "recompute_modules": ["mla_up_proj"]}
    # with scores, which stay: Megatron-LM runs the projections alone again
    kept, again, with_scores, again_with_scores = (
        kept_by_a_layer(
            model=MODEL, strategy="single", batch=1, seq_len=1024, model_options={**options, **more}
        )
        for scores in ({}, {"attention": "unfused", "attention_dropout": 0.0})
        for more in (scores, scores | up_again)
    )
    assert with_scores - again_with_scores == kept - again
    # latents are normalised and projected again, from what projects down, whole for the shared key
    remade = 2 * heads * (192 + 192 + 128) + 2 * (q_rank + kv_rank) + 2 * 4
    assert again == 1024 * (expected - remade - 2 * kv_rank + 2 * (kv_rank + 64))
    # without the fusion, each of two calls keeps a cosine and a sine of 64 features a position
    angles = 2 * 2 * 2 * 64 if rope == "apart" else 0
    assert kept == 1024 * (expected + angles)
