"""Latent attention and multi-token prediction: values, sizes, bytes, and what libraries keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.attended import Attended
from spbench.impls.composition import Stage
from spbench.impls.kernels.rotary import fused_rotary, keys_and_values, rotated, turned_queries
from spbench.impls.models.blocks.decoder_module import shifted_inputs
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.training.step import initialize
from tests.impls.models.test_fusions import kept_by_a_layer
from tests.measure.verify.assertions import assert_green

MODEL = "mla-tiny"
B, L = 2, 6


def latent(**options: Any) -> CausalTransformerModel:
    model = model_preset(MODEL, options)
    assert isinstance(model, CausalTransformerModel)
    return model


def built(model: CausalTransformerModel, stage: Stage | None = None) -> nn.Module:
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
    mixer, x = built(model).blocks["0"].mixer, torch.randn(B, L, model.hidden, dtype=torch.float64)  # type: ignore[index]
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
    module = built(model)
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
        assert site.dims["elements"] == sum(p.numel() for p in built(model, stage).parameters())


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
