"""Mixtures of experts on several ranks compute what one device does by torch's own operators.

Parameters of presets with experts beside published counts.

What a layer of experts holds on a card, beside a measured layer and what switches save.
Routers beside their papers' formulas, one token at a time."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.measure.engines.tracing import fake_mesh, no_cyclic_collection
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.trace.torch_internals import FakeTensorMode
from spbench.impls.kernels.grouped_matmul import GROUPED_STREAMS, GROUPED_WORKSPACES
from spbench.impls.kernels.projection import LIBRARIES, TRANSFORMER_ENGINE, mark_library
from spbench.impls.models.blocks.decoder import DecoderModel
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.blocks.router import Router, router_logits
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.place import Place
from spbench.impls.registries import model_preset
from spbench.impls.routing import capacity_of
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import default_dtype
from tests.grid import cases, data, tabled
from tests.impls.models.mixture_runs import Setting, worst_of_rank


@pytest.mark.parametrize("fields", cases(Path(__file__).with_name("experts.yaml")))
def test_gradients_and_bytes_equal_one_device(pool: RankPool, fields: dict[str, Any]) -> None:
    setting = Setting(**fields)
    found = pool.run(setting.sizes, worst_of_rank, setting)
    for error, name, unlike in found:
        assert error < 1e-10, name
        assert not unlike, unlike


PUBLISHED: dict[str, tuple[float, float | None, str]] = data(__file__)["PUBLISHED"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    model = model_preset(name)
    assert isinstance(model, DecoderModel)
    published, active, _ = PUBLISHED[name]
    counts = model.parameters(model.padded_vocabulary(1))
    assert counts["elements"] == pytest.approx(published, rel=5e-3)
    if active is not None:
        others = counts["elements"] - counts["experts"]
        met = others + counts["experts"] * model.experts_per_token / model.experts
        assert met == pytest.approx(active, rel=0.02)


#: tests/functional_tests/test_cases/common/moe_perf of NVIDIA/Megatron-LM, cases deepseek_*_tp1ep8_bf16: its
#: configuration has no gate and no shared experts, and one step's output and gradient live on into the next
LAYER: Mapping[str, Any] = data(__file__)["LAYER"]
WORKSPACE = 2**25 + 2**10
WORKSPACES = {
    "cublas": 2**25,
    "transformer_engine": WORKSPACE,
    GROUPED_WORKSPACES: GROUPED_STREAMS * WORKSPACE,
}


def peak_of_layer(options: Mapping[str, Any]) -> int:
    """Bytes at the peak of the second of two steps of one layer on 8 ranks, 4096 tokens each."""
    model, sizes = model_preset("moe-tiny", {**LAYER, **options}), {"dp": 8, "ep": 8}
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, no_cyclic_collection(), default_dtype(torch.bfloat16):
        recorder = Recorder(mesh)
        with FakeTensorMode(), recorder:
            layer = MixtureModule(model, nesting("single").configured(Place.on(mesh, sizes)))
            mark_library(layer, model.library)
            x = torch.empty(1, 4096, 7168, requires_grad=True)
            torch.mm(*(torch.empty(16, 16, dtype=torch.float32) for _ in range(2)))
            for last in (False, True):
                x.grad = None
                layer.zero_grad(set_to_none=True)
                with recorder.step(last=last):
                    y = layer(x)
                    d_y = torch.empty_like(y)
                    y.backward(d_y)
        log = recorder.memory.log.with_workspaces(WORKSPACES)
    events, sizes_of = np.array(log.events), np.array(log.sizes)
    levels = np.cumsum(np.sign(events) * sizes_of[np.abs(events) - 1])
    return int(levels[log.ends[0] : log.ends[1]].max())


@tabled(__file__, "peak_of_a_layer_on_h100")
def test_peak_of_a_layer_on_h100(dispatcher: str, measured: int, within: float) -> None:
    assert peak_of_layer({"dispatcher": dispatcher}) == pytest.approx(measured, rel=within)


def test_activations_that_are_made_again_are_not_kept() -> None:
    again = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    # the result of gelu, and its product with weights: [32768, 2048] each, in bf16
    assert peak_of_layer({}) - peak_of_layer(again) == pytest.approx(2 * 2**15 * 2048 * 2, rel=0.01)


def saved_by_layer(options: Mapping[str, Any], sizes: Mapping[str, int], strategy: str) -> int:
    """Bytes that a layer's forward of 64 positions of a tiny model keeps for backward."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return x

    model = model_preset("moe-tiny", options)
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, FakeTensorMode(), default_dtype(torch.bfloat16):
        layer = MixtureModule(model, nesting(strategy).configured(Place.on(mesh, sizes)))
        mark_library(layer, model.library)
        x = torch.empty(1, 64 // sizes.get("tp", 1), model.hidden, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            layer(x)
    return sum(kept.values())


# by experts, features [24] and their weights are kept in bf16, or rows [48]
@pytest.mark.parametrize(("weighted", "features"), [("output", 24), ("input", 48)])
def test_rows_that_tokens_weigh_are_kept_in_float32(weighted: str, features: int) -> None:
    sizes, weighing = {"dp": 2, "ep": 2}, {"expert_weighting": weighted}
    by_experts, by_tokens = (
        saved_by_layer(weighing | {"expert_weighting_at": at}, sizes, "single")
        for at in ("experts", "tokens")
    )
    assert by_tokens - by_experts == 64 * 3 * ((48 + 1) * 4 - (features + 1) * 2)


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_input_of_shared_experts_is_gathered_once_beside_the_dispatch(fp8: str) -> None:
    options = {"shared_inner": 64, "fp8": fp8, "library": TRANSFORMER_ENGINE}
    in_turn, beside = (
        saved_by_layer(options | {"shared_overlap": overlap}, {"tp": 2}, "megatron_sp")
        for overlap in (False, True)
    )
    assert beside - in_turn == (64 * 48 * 2 if fp8 == "none" else 0)


@pytest.mark.parametrize("library", ["torch", TRANSFORMER_ENGINE])
def test_megatron_gathers_tokens_into_a_buffer_that_stays(library: str) -> None:
    model, sizes = (
        model_preset("moe-tiny", {"dispatcher": "all_gather", "library": library}),
        {"dp": 2, "ep": 2},
    )
    assert isinstance(model, CausalTransformerModel)
    with fake_mesh(sizes, 0) as mesh, FakeTensorMode():
        strategy = nesting("single").configured(Place.on(mesh, sizes))
        layer = MixtureModule(model, strategy)
        for length in (16, 8):
            layer(torch.empty(1, length, model.hidden))
        held = strategy.buffer.take((1,), torch.empty(1)).untyped_storage().nbytes()
    # of both ranks, the longer of the two; nothing before where memory is made for them
    assert held == (4 if library == "torch" else 2 * 16 * model.hidden * 4)


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


ROUTERS: dict[str, dict[str, Any]] = data(__file__)["ROUTERS"]


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
