"""Routers beside their papers' formulas, one token at a time."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.impls.kernels.projection import LIBRARIES, mark_library
from spbench.impls.models.blocks.router import Router, router_logits
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.routing import capacity_of
from spbench.impls.strategies.base import Strategy

TOKENS, BATCH = 24, 2


def router(options: Mapping[str, Any]) -> tuple[CausalTransformerModel, Router]:
    model = model_preset("moe-tiny", options)
    assert isinstance(model, CausalTransformerModel)
    torch.set_default_dtype(torch.float64)
    try:
        module = Router(model, Strategy())
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        if module.choice_bias is not None:
            module.choice_bias.copy_(torch.linspace(0.5, -0.5, model.experts))
    return model, module


def hidden() -> Tensor:
    return torch.randn(TOKENS, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def by_hand(model: CausalTransformerModel, module: Router, x: Tensor) -> dict[int, float]:
    """The weights of a token's experts."""
    logits = [sum(float(w) * float(v) for w, v in zip(row, x, strict=True)) for row in module.weight.detach()]
    if module.bias is not None:
        logits = [logit + float(b) for logit, b in zip(logits, module.bias.detach(), strict=True)]
    experts = range(model.experts)
    if model.router == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    elif model.router_scores == "all":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = logits
    choice = [*scores]
    if module.choice_bias is not None:
        choice = [score + float(b) for score, b in zip(scores, module.choice_bias, strict=True)]
    allowed = set(experts)
    if model.router_groups:
        size = model.experts // model.router_groups
        best = model.experts_per_token // model.router_group_topk
        totals = {
            g: sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:best])
            for g in range(model.router_groups)
        }
        met = sorted(totals, key=lambda g: -totals[g])[: model.router_group_topk]
        allowed = {e for e in experts if e // size in met}
    chosen = sorted(allowed, key=lambda e: -choice[e])[: model.experts_per_token]
    weights = {e: scores[e] for e in chosen}
    if model.router == "softmax" and model.router_scores == "chosen":
        weights = {e: math.exp(score) for e, score in weights.items()}
        weights = {e: weight / sum(weights.values()) for e, weight in weights.items()}
    if model.router_normalized:
        total = sum(weights.values())
        weights = {e: weight / total for e, weight in weights.items()}
    return {e: weight * model.router_scale for e, weight in weights.items()}


ROUTERS: dict[str, dict[str, Any]] = {
    "Mixtral": {"router_scores": "chosen", "router_normalized": False},
    "Qwen3": {"router_scores": "all", "router_normalized": True},
    "DeepSeek-V2": {
        "router_normalized": False,
        "router_scale": 16.0,
        "router_groups": 4,
        "router_group_topk": 3,
    },
    "DeepSeek-V3": {
        "experts_per_token": 4,
        "router": "sigmoid",
        "router_normalized": True,
        "router_scale": 2.5,
        "router_groups": 4,
        "router_group_topk": 2,
        "router_bias": True,
    },
    "gpt-oss": {"router_scores": "chosen", "router_normalized": False, "router_linear_bias": True},
    "Llama 4": {"experts_per_token": 1, "router": "sigmoid", "router_normalized": False},
}


@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_weights_are_those_of_the_paper(options: dict[str, Any]) -> None:
    model, module = router(options)
    x = hidden()
    routed = module(x, BATCH, None)
    for token in range(TOKENS):
        expected = by_hand(model, module, x[token])
        chosen = routed.chosen[token].nonzero().flatten().tolist()
        assert sorted(expected) == chosen
        for expert, weight in expected.items():
            assert float(routed.weights[token, expert]) == pytest.approx(weight, rel=1e-12)


def gradient_of(options: dict[str, Any], x: Tensor) -> tuple[CausalTransformerModel, Router, Tensor]:
    """The gradient of the router's logits of losses alone, as the rest has none."""
    model, module = router(options)
    routed = module(x, BATCH, None)
    (routed.weights * 0).sum().backward()
    return model, module, module.weight.grad


def test_z_loss_is_the_mean_square_of_the_logsumexp() -> None:
    x = hidden()
    _, module, gradient = gradient_of({"z_weight": 0.1}, x)
    weight = module.weight.detach().requires_grad_()
    (0.1 * torch.logsumexp(x @ weight.mT, -1).square().mean()).backward()
    torch.testing.assert_close(gradient, weight.grad)


@pytest.mark.parametrize("kind", ["batch", "sequence"])
def test_the_auxiliary_loss_is_the_sum_of_shares_times_mean_scores(kind: str) -> None:
    x = hidden()
    model, module, gradient = gradient_of({"aux_loss": kind, "aux_weight": 0.1}, x)
    weight = module.weight.detach().requires_grad_()
    scores = (x @ weight.mT).softmax(-1)
    chosen = module(x, BATCH, None).chosen
    sequences = [slice(0, 12), slice(12, 24)] if kind == "sequence" else [slice(0, 24)]
    losses = []
    for part in sequences:
        share = chosen[part].double().mean(0) / model.experts_per_token
        losses.append(0.1 * model.experts * (share * scores[part].mean(0)).sum())
    (sum(losses, torch.zeros(())) / len(losses)).backward()
    torch.testing.assert_close(gradient, weight.grad)


def test_sinkhorn_uses_experts_more_evenly_than_scores_do() -> None:
    options = {"router": "sinkhorn", "experts_per_token": 1, "router_normalized": False}
    _, balanced = router(options)
    _, plain = router({**options, "router": "softmax"})
    x = hidden() + 2.0  # one expert is best for most
    most = [int(module(x, BATCH, None).chosen.sum(0).max()) for module in (balanced, plain)]
    assert most[0] < most[1]


@pytest.mark.parametrize("padded", [False, True])
def test_full_experts_keep_the_tokens_of_the_largest_weights(padded: bool) -> None:
    options = {"experts_per_token": 2, "router_normalized": False}
    _, unlimited = router(options)
    model, module = router({**options, "capacity": 1.0, "capacity_padded": padded})
    x = hidden()
    whole, limited = unlimited(x, BATCH, None), module(x, BATCH, None)
    capacity = capacity_of(TOKENS, 2, model.experts, 1.0)
    assert capacity == 4
    for expert in range(model.experts):
        wanted = whole.chosen[:, expert].nonzero().flatten().tolist()
        kept = sorted(wanted, key=lambda t: -float(whole.weights[t, expert]))[:capacity]
        got = limited.chosen[:, expert].nonzero().flatten().tolist()
        assert set(kept) <= set(got)
        assert len(got) == (capacity if padded else len(kept))
        assert all(float(limited.weights[t, expert]) == 0 for t in got if t not in kept)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("library", LIBRARIES)
def test_megatrons_router_multiplies_by_transformer_engine(library: str) -> None:
    layer = nn.Linear(4, 3, bias=False)
    mark_library(layer, library)
    x = torch.randn(2, 4, requires_grad=True)
    with _Names() as seen:
        router_logits(x, layer.weight, None, torch.float32).sum().backward()
    assert ("te_mm" in seen.names, "mm" in seen.names) == (library != "torch", library == "torch")
