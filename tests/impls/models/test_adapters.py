"""Adapters of low rank: what is trained, what is kept, and ranks beside one device."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.kernels.projection import project
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.engines.real_ranks import assert_real_ranks_send_the_same
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.planting import planted
from tests.slow import mostly_slow, slow

MODEL, RANK = "causal-transformer-tiny-gqa", 4


def adapted(**options: Any) -> CausalTransformerModel:
    model = model_preset(MODEL, {"lora_rank": RANK, **options})
    assert isinstance(model, CausalTransformerModel)
    return model


STRATEGIES = ("tensor_parallel", "megatron_sp", "ulysses", "ring_attention", "upipe", "fpdt", "odysseus")
BACKENDS = ("legacy_ddp", "ddp", "zero1", "zero2", "zero3", "megatron")


@pytest.mark.parametrize("n", mostly_slow((1, 2, 3, 4), 4))
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
    """Experts, latents and linear attention are frozen beside the adapters of the rest."""
    alone = {"mtp_layers": 0} if model == "mla-tiny" else {}
    plain = model_preset(model, alone)
    assert isinstance(plain, CausalTransformerModel)
    options = plain.adapter_variants()[0]
    assert_green(pool, Case(strategy_class(strategy), model_preset(model, {**alone, **options}), "model"), 2)


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


Unscaled = planted("Unscaled", Ulysses, linear_out=_unscaled)
AdapterNotSummed = planted("AdapterNotSummed", TensorParallel, enter=_not_entered)


def test_a_missing_scale_is_red(pool: RankPool) -> None:
    assert_red(pool, Case(Unscaled, adapted(), "model"), 2)


def test_gradients_of_adapters_that_are_not_summed_are_red(pool: RankPool) -> None:
    assert_red(pool, Case(AdapterNotSummed, adapted(), "model"), 2, "gradient of blocks")


# -- sizes, bytes and memory -----------------------------------------------------------------------------

OPTIONS = {"lora_rank": RANK, "tied": True}
#: weights that are not trained are in no bucket
OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("sizes", "training"),
    [
        ({"pp": 2}, {"micro_batches": 2, "backend": "ddp"}),
        slow({"dp": 2}, {"backend": "zero3"}),
        slow({"tp": 2}, {"backend": "megatron"}),
        ({"dp": 2}, {"backend": "megatron", **OVERLAPPED}),
    ],
)
def test_real_ranks_send_what_virtual_ones_do(
    pool: RankPool, sizes: dict[str, int], training: dict[str, Any]
) -> None:
    strategy = "megatron_sp" if "tp" in sizes else "single"
    cell = {"model": MODEL, "strategy": strategy, "sizes": sizes, "batch": 4, "seq_len": 24}
    both = {"model_options": OPTIONS, "training": training}
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_targets": ["query"]}, "lora_targets has words of q_proj"),
        ({"lora_targets": ["q_proj"]}, "name all or none of them, or set separate_projections"),
        ({"lora_targets": []}, "names no projection"),
        ({"recompute": "operators"}, "neither mtp_layers nor recompute: operators"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        adapted(**options)
