"""Recomputation of all but some operators, and projections that are a matmul each."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.collectives import reduce_from_group
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.models.blocks import recomputation
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import model_preset
from tests.impls.models.test_early_stop import kernels, trace
from tests.impls.models.test_recomputed_dropout import gradients

GROUPED = "causal-transformer-tiny-gqa"
SEPARATE = {"separate_projections": True}


def test_each_second_product_and_what_is_cheap_run_again() -> None:
    """3 of the 7 products of each of two layers."""
    plain = kernels(trace(model=GROUPED, model_options=SEPARATE))
    again = kernels(trace(model=GROUPED, model_options=SEPARATE | {"recompute": "operators"})) - plain
    assert again["mm"] == 2 * 3
    assert again["flash_attention"] == 0
    assert again["silu"] == 2


@pytest.mark.parametrize(("layers", "every", "recomputed"), [(4, 2, 2), (3, 2, 1), (4, 3, 1)])
def test_one_layer_of_each_interval_runs_again(layers: int, every: int, recomputed: int) -> None:
    full = {"recompute": "full", "recompute_method": "interval", "recompute_layers": every}
    plain = kernels(trace(model_options={"layers": layers}))
    again = kernels(trace(model_options=full | {"layers": layers})) - plain
    assert again == Counter({name: n for name, n in again.items() if n % recomputed == 0})
    assert again["flash_attention"] == recomputed


@pytest.mark.parametrize("strategy", ["tensor_parallel", "megatron_sp", "ulysses", "ring_attention"])
def test_bytes_are_those_of_the_closed_form(strategy: str) -> None:
    axis = "tp" if strategy in ("tensor_parallel", "megatron_sp") else "sp"
    options = SEPARATE | {"recompute": "operators"}
    found = trace(model=GROUPED, strategy=strategy, sizes={axis: 2}, model_options=options)
    assert found.measurement(None).formula_difference == []


@pytest.mark.parametrize("backend", ["zero3", "zero2"])
def test_sharded_weights_are_gathered_no_more_often(backend: str) -> None:
    options = SEPARATE | {"recompute": "operators"}
    training = {"backend": backend, "micro_batches": 2}
    found = trace(model_options=options, sizes={"dp": 2}, batch=4, training=training)
    assert found.measurement(None).formula_difference == []


def test_the_second_run_keeps_the_products_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.12 asks the policy in both runs, later ones in the first; an odd number must not shift it."""
    asked: list[Any] = []
    monkeypatch.setattr(
        recomputation,
        "create_selective_checkpoint_contexts",
        lambda policy: (asked.append(policy), (nullcontext(), nullcontext()))[1],
    )
    first, again = recomputation._keeping()
    (policy,) = asked
    kept = {}
    for context, run in ((first, False), (again, True)):
        with context:
            of_run = SelectiveCheckpointContext(is_recompute=run)
            kept[run] = [policy(of_run, torch.ops.aten.mm.default) for _ in range(7)]
    assert kept[False] == kept[True]
    assert kept[True].count(CheckpointPolicy.MUST_SAVE) == 4


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "biases": False, "mlp": "swiglu"}])
def test_gradients_are_those_without_recomputation(options: dict[str, Any]) -> None:
    plain = gradients(**SEPARATE, **options)
    again = gradients(**SEPARATE, **options, recompute="operators")
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert again[name].allclose(gradient, rtol=1e-11, atol=1e-14), name


def gradient_of_summed_product(mesh: DeviceMesh, keep: bool) -> list[float]:
    """The gradient of a weight, in a block whose backward needs its first product summed over the ranks."""
    group = mesh.get_group("tp")
    weight = torch.ones(2, 2, dtype=torch.float64).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(x @ weight, group) ** 2

    x = torch.full((1, 2), 1.0 + mesh.get_local_rank("tp"), dtype=torch.float64)
    y = recomputed(block, DropoutRandom(0), x, keep=True) if keep else block(x)
    y.sum().backward()
    assert weight.grad is not None
    return weight.grad.flatten().tolist()


def test_a_kept_product_is_summed_over_ranks_once(pool: RankPool) -> None:
    """In place, it would be summed again when the block runs again, which torch does not allow."""
    assert pool.run({"tp": 2}, gradient_of_summed_product, False) == [[12.0] * 4, [24.0] * 4]
    assert pool.run({"tp": 2}, gradient_of_summed_product, True) == [[12.0] * 4, [24.0] * 4]


def test_separate_projections_are_of_torch() -> None:
    with pytest.raises(ValueError, match="separate_projections needs library: torch"):
        model_preset(GROUPED, SEPARATE | {"library": "transformer-engine"})
    refused = trace_error(strategy="tensor_parallel", sizes={"tp": 3})
    assert "3 ranks do not divide 4 heads of keys and values" in refused


def trace_error(**changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        trace(model=GROUPED, model_options=SEPARATE, **changes)
    return str(error.value)
