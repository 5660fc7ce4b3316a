"""Adapters of low rank: what is trained, what is kept, and ranks beside one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.kernels.grouped_matmul import grouped_project, stacked_project
from spbench.impls.kernels.projection import project
from spbench.impls.models.blocks.adapters import OpeningAdapters
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.engines.cells import assert_real_ranks_send_the_same
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.expert_faults import in_each_block
from tests.measure.verify.planting import planted
from tests.slow import mostly_slow, slow

MODEL, RANK = "causal-transformer-tiny-gqa", 4


def adapted(**options: Any) -> CausalTransformerModel:
    model = model_preset(MODEL, {"lora_rank": RANK, **options})
    assert isinstance(model, CausalTransformerModel)
    return model


STRATEGIES = ("tensor_parallel", "megatron_sp", "ulysses", "ring_attention", "upipe", "fpdt", "odysseus")
BACKENDS = ("legacy_ddp", "ddp", "zero1", "zero2", "zero3", "megatron")


@pytest.mark.parametrize("n", mostly_slow((1, 2, 4), 4))
@pytest.mark.parametrize("strategy", mostly_slow(STRATEGIES, "tensor_parallel", "megatron_sp", "ulysses"))
@pytest.mark.parametrize("variant", [0, 1])
def test_ranks_compute_what_one_device_does(pool: RankPool, strategy: str, n: int, variant: int) -> None:
    model = adapted(**adapted().adapter_variants()[variant])
    assert_green(pool, Case(strategy_class(strategy), model, "model"), n)


@pytest.mark.parametrize("model", ["moe-tiny", "mla-tiny", "hybrid-tiny"])
@pytest.mark.parametrize("strategy", mostly_slow(("megatron_sp", "ulysses"), "megatron_sp"))
def test_layers_have_the_adapters_that_their_projections_can_take(
    pool: RankPool, strategy: str, model: str
) -> None:
    """Experts and latents have their own; linear attention is frozen."""
    alone = {"mtp_layers": 0} if model == "mla-tiny" else {}
    plain = model_preset(model, alone)
    assert isinstance(plain, CausalTransformerModel)
    options = plain.adapter_variants()[0]
    assert_green(pool, Case(strategy_class(strategy), model_preset(model, {**alone, **options}), "model"), 2)


TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj", "experts")
ALL = {"lora_rank": RANK, "lora_targets": TARGETS, "shared_inner": 24}
#: Mixtral's uneven routing beside shared experts, and all tokens to three experts of twelve
UNEVEN = {**ALL, "routing": "zipf:1.5", "recompute": "selective"}
FEW = {**ALL, "routing": "zipf:40", "z_weight": 0.01, "expert_weighting": "input"}
KEPT = {"recompute_modules": ("moe_act", "shared_experts"), "library": "transformer-engine"}


@pytest.mark.parametrize("options", [{**UNEVEN, **KEPT}, slow(FEW), slow({**FEW, "stacked_experts": True})])
@pytest.mark.parametrize("strategy", mostly_slow(("ulysses", "megatron_sp"), "ulysses", "megatron_sp"))
def test_each_expert_has_adapters_where_its_rank_is(
    pool: RankPool, strategy: str, options: dict[str, Any]
) -> None:
    case = Case(strategy_class(strategy), model_preset("moe-tiny", options), "model", folds={"ep": 2})
    assert_green(pool, case, 2)


@pytest.mark.parametrize("options", [{}, slow({"q_lora_rank": None})])
@pytest.mark.parametrize(
    "strategy", mostly_slow(("tensor_parallel", "megatron_sp", "ulysses"), "megatron_sp")
)
def test_projections_of_latents_have_adapters_with_their_recomputation(
    pool: RankPool, strategy: str, options: dict[str, Any]
) -> None:
    again = {"recompute": "selective", "recompute_modules": ("mla_up_proj",)}
    case = Case(strategy_class(strategy), latent(**again, **options), "model")
    assert_green(pool, case, 2)


def latent(**options: Any) -> CausalTransformerModel:
    queries = ("q_a_proj", "q_b_proj") if options.get("q_lora_rank", 1) else ("q_proj",)
    targets = {"lora_rank": RANK, "lora_targets": (*queries, "kv_a_proj_with_mqa", "kv_b_proj")}
    model = model_preset("mla-tiny", {"mtp_layers": 0, **targets, **options})
    assert isinstance(model, CausalTransformerModel)
    return model


def test_a_trace_of_dense_layers_alone_keeps_the_words_of_experts() -> None:
    few = model_preset("moe-tiny", {**ALL, "layers": 1, "dense_layers": 1})
    assert "experts" in few.lora_targets  # type: ignore[attr-defined]
    counts = few.parameters(few.padded_vocabulary(1))  # type: ignore[attr-defined]
    assert not counts.get("experts")


def test_a_frozen_expert_keeps_no_input_and_has_no_gradient() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    frozen = nn.Parameter(torch.randn(2, 3, 6), requires_grad=False)
    for y in (stacked_project(x, frozen, [2, 3]), grouped_project(x, [*frozen], [2, 3])):
        assert y.grad_fn.saved_tensors == (None,)  # type: ignore[union-attr]
        y.sum().backward()
    assert frozen.grad is None
    torch.testing.assert_close(
        x.grad, 2 * torch.cat([frozen[0].sum(0).expand(2, -1), frozen[1].sum(0).expand(3, -1)])
    )


@pytest.mark.parametrize("n", mostly_slow((2, 4), 2))
@pytest.mark.parametrize("backend", mostly_slow(BACKENDS, "zero1", "zero3", "megatron"))
def test_backends_sum_the_gradients_of_adapters_alone(pool: RankPool, backend: str, n: int) -> None:
    assert_green(pool, Case(strategy_class("ulysses"), adapted(), "model", backend=backend), n)


# -- planted faults --------------------------------------------------------------------------------------


def _unscaled(self: Any, honest: Any, in_features: int, out_features: int) -> Linear:
    """The factor alpha / r is missing."""
    linear: Linear = honest(in_features, out_features)
    if out_features == RANK:
        scale, project = RANK / adapted().lora_alpha, linear.project
        linear.project = lambda x: project(x) * scale  # type: ignore[method-assign]
    return linear


def _not_entered(self: Any, honest: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The gradient of the features between the two factors is this rank's part alone."""
    return project(x, weight, bias) if x.shape[-1] == RANK else honest(x, weight, bias)


def _of_the_next(block: MixtureModule) -> None:
    """An expert's rows meet the adapter of another one."""
    block.adapters.opens_up = nn.ModuleDict(reversed(block.adapters.opens_up.items()))  # type: ignore[operator,arg-type]


def _summed_over_all(block: MixtureModule) -> None:
    for p in block.adapters.parameters():
        p.spbench_expert = False  # type: ignore[attr-defined]


OfTheNext = planted("OfTheNext", CausalTransformerModel, build=in_each_block(_of_the_next))
SummedOverAll = planted("SummedOverAll", CausalTransformerModel, build=in_each_block(_summed_over_all))
Unscaled = planted("Unscaled", Ulysses, linear_out=_unscaled)
AdapterNotSummed = planted("AdapterNotSummed", TensorParallel, enter=_not_entered)


def test_a_missing_scale_is_red(pool: RankPool) -> None:
    assert_red(pool, Case(Unscaled, adapted(), "model"), 2)


def test_gradients_of_adapters_that_are_not_summed_are_red(pool: RankPool) -> None:
    assert_red(pool, Case(AdapterNotSummed, adapted(), "model"), 2, "gradient of blocks")


def test_gradients_of_adapters_of_latents_that_are_not_summed_are_red(pool: RankPool) -> None:
    assert_red(pool, Case(AdapterNotSummed, latent(), "model"), 2, "gradient of blocks")


@pytest.mark.parametrize(
    ("fault", "what"),
    [(OfTheNext, "gradient of blocks.0.mlp.adapters"), (SummedOverAll, "gradient of blocks")],
)
def test_faults_in_adapters_of_experts_are_red(
    pool: RankPool, fault: type[CausalTransformerModel], what: str
) -> None:
    model = fault(**{**vars(model_preset("moe-tiny")), **ALL})
    assert_red(pool, Case(Ulysses, model, "model", folds={"ep": 2}), 2, what)


# -- sizes, bytes and memory -----------------------------------------------------------------------------

OPTIONS = {"lora_rank": RANK, "tied": True}
WHOLE = {"lora_rank": RANK, "lora_whole": ["embedding", "head"]}
#: weights that are not trained are in no bucket
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        ({"pp": 2}, {"micro_batches": 2, "backend": "ddp"}),
        slow({"dp": 2}, {"backend": "zero3"}),
        slow({"tp": 2}, {"backend": "megatron"}),
        ({"dp": 2}, {"backend": "megatron", **OVERLAPPED}),
        ({"pp": 2, "tp": 2}, {"micro_batches": 2, "backend": "zero3"}),
        ({"dp": 2, "ep": 2}, {"backend": "zero3"}),
    ],
)
def test_real_ranks_send_what_virtual_ones_do(
    pool: RankPool, sizes: dict[str, int], training: dict[str, Any]
) -> None:
    strategy = "megatron_sp" if "tp" in sizes else "single"
    cell = {"model": MODEL, "strategy": strategy, "sizes": sizes, "batch": 4, "seq_len": 24}
    both = {"model_options": OPTIONS, "training": training}
    if {"pp", "tp"} <= sizes.keys():
        both |= {"model_options": WHOLE, "strategy_options": {"vocabulary": "split"}}
    if "ep" in sizes:
        both |= {"model": "moe-tiny", "model_options": {**ALL, "stacked_experts": True, "routing": "even"}}
    assert_real_ranks_send_the_same(pool, Cell.model_validate(cell | both))


def test_a_rank_holds_states_of_adapters_alone() -> None:
    def held(**options: Any) -> dict[str, int]:
        cell = Cell(
            model=MODEL, strategy="single", batch=1, seq_len=24, precision="fp32", model_options=options
        )
        return trace(cell).memory.peak().held

    whole, few = held(), held(lora_rank=RANK)
    weights = [*adapted().build(Strategy(), 24).parameters()]
    trained, frozen = ([4 * p.numel() for p in weights if p.requires_grad == kind] for kind in (True, False))
    assert few["parameters"] == sum(map(rounded, trained + frozen))
    assert whole["parameters"] == sum(map(rounded, frozen))
    # one buffer
    assert (few["gradients"], whole["gradients"]) == (rounded(sum(trained)), rounded(sum(frozen)))


def test_what_is_trained_whole_has_a_gradient_and_a_frozen_copy() -> None:
    model = adapted(**WHOLE)
    module = model.build(Strategy(), 24)
    tables = {"embedding.weight": True, "head": True, "originals.embedding": False, "originals.head": False}
    held = {name: p.requires_grad for name, p in module.named_parameters() if p.shape[0] == model.vocabulary}
    assert held == tables
    with torch.device("cpu"):
        loss = module(model.inputs(2, 24, torch.Generator().manual_seed(0)))["loss"]
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in module.parameters())


def test_dropout_is_of_what_adapters_take_and_the_same_where_layers_are_recomputed() -> None:
    def gradients(**options: Any) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model, strategy = adapted(tied=True, **options), Strategy()
        strategy.random.begin_step(0)
        module = model.build(strategy, 24)
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
        loss = module(model.inputs(2, 24, torch.Generator().manual_seed(0)))["loss"]
        return loss.detach(), [*torch.autograd.grad(loss, trained)]

    half = gradients(lora_dropout=0.5)
    torch.testing.assert_close(half, gradients(lora_dropout=0.5, recompute="full"))
    assert (half[0] - gradients()[0]).abs() > 1e-3
    # what is not dropped counts for more, so that the mean stays
    adapter = OpeningAdapters(adapted(lora_dropout=0.5), Strategy(), 1, ("q_proj",), nn.Identity, nn.Identity)
    ones = adapter.dropped(torch.ones(10_000), ())
    assert {*ones.unique().tolist()} == {0.0, 2.0}
    assert abs(ones.mean() - 1) < 0.05


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_targets": ["query"]}, "lora_targets has words of q_proj"),
        ({"lora_targets": ["q_proj"]}, "name all or none of them, or set separate_projections"),
        ({"lora_targets": []}, "names no projection"),
        ({"lora_whole": ["head"], "tied": True}, "needs lora_rank and a head of its own"),
        ({"lora_whole": ["norm"]}, "lora_whole has words of embedding, head"),
        ({"lora_targets": ["experts"]}, "this model has no experts for adapters; name some of q_proj, "),
        ({"recompute": "operators"}, "neither mtp_layers nor recompute: operators"),
        ({"lora_dropout": 1.0}, "at least 0 and below 1"),
        ({"lora_dropout": 0.1, "mlp_tile": 7}, "goes with neither mlp_tile nor"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adapted(**options)
