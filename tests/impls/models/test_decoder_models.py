"""Causal language models: sizes as published, closed forms as built, no look ahead.

What a step of causal language models sends and holds, and what its backward keeps.
"""

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
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.rotary import rotated
from spbench.impls.models.blocks.decoder import DecoderModel
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.text import SEP, causal_language_batches, corpus
from spbench.impls.models.linear_llama import LinearLlamaModel
from spbench.impls.models.model import model_preset, models
from spbench.impls.models.tnl import decay_rates, slopes
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.slow import slow

DECODERS = [name for name, model in models().items() if isinstance(model, DecoderModel)]
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
    (site,) = (site for site in model.sites(1, 64, parts, stage) if site.kind == "parameters")
    return dict(site.dims)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("tnl-0.4b", 0.436e9),
        ("tnl-1b", 1.095e9),
        ("tnl-7b", 7.08e9),
        ("linear-transformer-0.4b", 0.4e9),
        ("causal-transformer-1b", 1.0e9),
        ("llama3-8b", 8.0e9),
        ("llama3-70b", 70.6e9),
        ("llama3-405b", 405.9e9),
        ("gpt3-345m", 0.355e9),
        ("gpt3-7b", 6.66e9),
        ("gpt3-175b", 174.6e9),
    ],
)
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
