"""Matmuls of experts and latents in eight bits: each expert as a projection of its own, bytes sent. Casts by
scales of earlier passes: values, the history, one scale on all ranks, bytes of all-reduces."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.setup import build_training, rank_inputs
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from spbench.bench.measure.trace.operator_prices import GROUPED_MATMULS
from spbench.impls.kernels import fp8_delayed, fp8_grouped
from spbench.impls.kernels.fp8_casts import E4M3, E5M2, fp8_cast
from spbench.impls.kernels.fp8_delayed import (
    DelayedScaling,
    fp8_cast_both_delayed_,
    fp8_cast_delayed_,
    fp8_update_scales_,
)
from spbench.impls.kernels.fp8_grouped import fp8_amax_rows, fp8_cast_rows, grouped_project_fp8
from spbench.impls.kernels.fp8_projection import RECIPES, mark_recipe
from spbench.impls.kernels.projection import project
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from tests.impls.backends.one_device import set_weights
from tests.impls.kernels.made import bytes_kept, made
from tests.impls.models.test_recomputation import kernels, trace

ROWS = [40, 0, 200, 16]
ENGINE = ["tensorwise", "blockwise", "mxfp8"]
OPTIONS = {"library": "transformer-engine"}


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    parameters = [nn.Parameter(made(96, 128, seed=seed).detach().to(dtype)) for seed in range(len(ROWS))]
    for weight in parameters:
        weight.spbench_library = "transformer-engine"  # type: ignore[attr-defined]
    return parameters


def gradients(name: str, grouped: bool) -> list[Tensor]:
    """The output, and the gradients of rows and of all weights."""
    x, d_y, each = made(sum(ROWS), 128, seed=9), made(sum(ROWS), 96, seed=8).detach(), weights()
    if grouped:
        y = grouped_project_fp8(x, each, ROWS, RECIPES[name])
    else:
        for weight in each:
            weight.spbench_fp8 = RECIPES[name]  # type: ignore[attr-defined]
        parts = zip(x.split(ROWS), each, strict=True)
        y = torch.cat([project(part, w) if len(part) else part.new_empty(0, 96) for part, w in parts])
    used = [w for w, n in zip(each, ROWS, strict=True) if n]
    return [y.detach(), *torch.autograd.grad(y, [x, *used], d_y)]


@pytest.mark.parametrize("name", ENGINE)
def test_experts_are_as_projections_one_by_one(name: str) -> None:
    """Which are held to float64 by tests of their own."""
    for together, one_by_one in zip(gradients(name, True), gradients(name, False), strict=True):
        assert torch.allclose(together, one_by_one, rtol=1e-6, atol=1e-6)


def test_the_transpose_of_another_experts_rows_is_seen() -> None:
    honest = fp8_grouped._turned

    def swapped(*args: Any) -> list[Tensor]:
        data, *others = args
        return honest(data.flip(0), *others)

    with mock.patch.object(fp8_grouped, "_turned", swapped):
        wrong = gradients("tensorwise", True)
    right = gradients("tensorwise", False)
    assert torch.allclose(wrong[1], right[1], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(wrong[2], right[2], rtol=1e-2, atol=1e-2)


def test_an_expert_without_rows_has_no_gradient() -> None:
    each = weights()
    y = grouped_project_fp8(made(sum(ROWS), 128), each, ROWS, RECIPES["tensorwise"])
    y.sum().backward()
    assert not each[1].grad.any()
    assert fp8_amax_rows(made(sum(ROWS), 8).detach(), ROWS)[1] == 0


def test_gradients_are_added_to_a_buffer() -> None:
    each = weights()
    for weight in each:
        weight.main_grad = torch.ones(96, 128, dtype=torch.float64)  # type: ignore[attr-defined]
        weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    x, d_y = made(sum(ROWS), 128, seed=9), made(sum(ROWS), 96, seed=8).detach()
    grouped_project_fp8(x, each, ROWS, RECIPES["blockwise"]).backward(d_y)
    expected = gradients("blockwise", True)[2:]
    used = [w for w, n in zip(each, ROWS, strict=True) if n]
    for weight, gradient in zip(used, expected, strict=True):
        assert torch.allclose(weight.main_grad, gradient + 1, rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]


def test_what_is_kept_is_the_transposes_in_eight_bits() -> None:
    x, each = made(256, 128, dtype=torch.bfloat16), weights(torch.bfloat16)
    kept = bytes_kept(lambda: grouped_project_fp8(x, each, [64] * 4, RECIPES["mxfp8"]))
    assert kept == (x.numel() + 4 * each[0].numel()) * 33 // 32


@pytest.mark.parametrize("name", ENGINE)
def test_scales_are_of_each_experts_rows(name: str) -> None:
    recipe, x = RECIPES[name], made(sum(ROWS), 128).detach()
    largest = fp8_amax_rows(x, ROWS) if recipe.whole else None
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [
            each.shape for each in fp8_cast_rows(x, ROWS, largest, torch.float8_e4m3fn, recipe.tile, None)
        ]
    real = fp8_cast_rows(x, ROWS, largest, torch.float8_e4m3fn, recipe.tile, None)
    assert [each.shape for each in real] == shapes


@pytest.mark.parametrize(
    ("model", "options", "strategy", "sizes"),
    [
        ("moe-tiny", {"fp8": "tensorwise"}, "megatron_sp", {"tp": 2}),
        ("moe-tiny", {"fp8": "blockwise", "dispatcher": "all_to_all"}, "single", {"dp": 2, "ep": 2}),
        ("mla-tiny", {"fp8": "tensorwise"}, "megatron_sp", {"tp": 2}),
        ("mla-tiny", {"fp8": "delayed"}, "megatron_sp", {"tp": 2}),
        ("mla-tiny", {"fp8": "blockwise"}, "tensor_parallel", {"tp": 2}),
    ],
)
def test_bytes_are_those_of_the_closed_form(
    model: str, options: dict[str, Any], strategy: str, sizes: dict[str, int]
) -> None:
    grouped = {"experts_matmul": "grouped"} if model == "moe-tiny" else {}
    training = {"backend": "megatron", "micro_batches": 2}
    setting = {"strategy": strategy, "sizes": sizes, "batch": 4, "precision": "bf16", "training": training}
    traced = trace(model=model, model_options={**OPTIONS, **grouped, **options}, **setting)
    assert traced.measurement(None).formula_difference == []
    counted = kernels(traced)
    assert bool(grouped) == (counted["te_fp8_grouped_mm"] > 0)
    assert "te_grouped_mm" not in counted
    assert {name for name in counted if "grouped_mm" in name} <= GROUPED_MATMULS.keys()


NUMBERS = (torch.finfo(E4M3).max, torch.finfo(E5M2).max)
DELAYED = {"fp8": "delayed", "library": "transformer-engine", "layers": 2}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_cast_by_the_scale_of_its_own_magnitude_is_that_of_current_scaling(dtype: torch.dtype) -> None:
    x = made(5, 7).detach()
    largest = x.abs().max().float()
    scale, noted = largest / torch.finfo(dtype).max, torch.zeros(())
    for transposed in (False, True):
        expected, of_expected = fp8_cast(x, largest, dtype, [0, 0], None, transposed)
        data, of_data = fp8_cast_delayed_(x, scale, noted, dtype, transposed)
        assert torch.equal(data.float(), expected.float())
        assert torch.equal(of_data, of_expected)
    assert noted == largest
    both = fp8_cast_both_delayed_(x, scale, noted, dtype)
    assert torch.equal(both[0].float(), both[1].mT.float())
    fp8_cast_delayed_(x / 2, scale, noted, dtype, False)
    assert noted == largest  # the most of a pass


def test_what_is_too_large_for_a_scale_becomes_the_largest_number() -> None:
    data, scale = fp8_cast_delayed_(
        torch.tensor([[3.0, -1e6]]), torch.tensor(1.0), torch.zeros(()), E4M3, False
    )
    assert data.float().tolist() == [[3.0, -448.0]]
    assert scale.tolist() == [[1.0]]


@pytest.mark.parametrize("length", [1, 3])
def test_a_scale_is_of_the_largest_magnitude_of_its_history(length: int) -> None:
    passes = [[8.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 5.0], [4.0, 0.0]]
    history, scales = torch.zeros(length, 2), torch.ones(2)
    expected = [1.0, 1.0]
    for number, magnitudes in enumerate(passes):
        history[0] = torch.tensor(magnitudes)
        fp8_update_scales_(history, scales, 2.0)
        seen = passes[max(0, number - length + 1) : number + 1]
        for column in range(2):
            if largest := max(each[column] for each in seen):
                expected[column] = largest / 2
        assert scales.tolist() == expected
        assert not history[0].any()


def errors(updated: bool) -> dict[str, float]:
    """Errors of a projection of small numbers in a second pass, from float64."""
    x, d_y = made(64, 64) * 1e-4, made(64, 64, seed=1).detach() * 1e-7
    x = x.detach().requires_grad_()
    layer = nn.Module()
    layer.weight = nn.Parameter(made(64, 64, seed=2).detach() * 1e-4)
    scaling = DelayedScaling(layer, 1, NUMBERS, None)
    layer.weight.spbench_library = "transformer-engine"  # type: ignore[attr-defined]
    mark_recipe(layer, RECIPES["delayed"])
    for _ in range(2):
        y = project(scaling.entering(x), layer.weight)
        if updated:
            scaling.update(forward=True)
        without = mock.patch.object(DelayedScaling, "update") if not updated else mock.MagicMock()
        with without:
            d_x, d_w = torch.autograd.grad(y, [x, layer.weight], d_y)
    w = layer.weight.detach()
    exact = {"y": x.detach() @ w.T, "d_x": d_y @ w, "d_W": d_y.T @ x.detach()}
    got = {"y": y.detach(), "d_x": d_x, "d_W": d_w}
    return {name: ((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def test_a_second_pass_is_near_float64_and_without_scales_small_numbers_are_lost() -> None:
    assert max(errors(updated=True).values()) < 0.08
    assert min(errors(updated=False).values()) > 0.5


def scales_of_rank(mesh: DeviceMesh, cell: Cell) -> dict[str, Tensor]:
    """After one step of a model."""
    training, strategy, around = build_training(cell, mesh, set_weights)
    model = model_preset(cell.model, cell.model_options)
    batch = model.inputs(cell.batch, cell.seq_len, torch.Generator().manual_seed(0))
    batch = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    training.gradients(rank_inputs(model, strategy, around, batch))
    return {name: x.clone() for name, x in training.module.scaling.named_buffers()}  # type: ignore[union-attr]


def scales(sizes: dict[str, int], strategy: str = "single") -> list[dict[str, Tensor]]:
    settings = {"model": "causal-transformer-tiny", "model_options": DELAYED, "batch": 4, "seq_len": 16}
    cell = Cell.model_validate(settings | {"strategy": strategy, "sizes": sizes, "precision": "fp64"})
    return LockstepRanks().run(sizes or {"dp": 1}, scales_of_rank, cell)


def test_all_ranks_have_the_scales_of_one_device() -> None:
    (one,) = scales({"dp": 1})
    # a loss is a share of the sum over ranks, so that gradients are one device's
    for of_rank in scales({"dp": 2}):
        for name, x in of_rank.items():
            assert torch.allclose(x, one[name], rtol=1e-3), name


def test_a_scale_of_one_rank_alone_is_seen() -> None:
    with mock.patch.object(fp8_delayed, "all_reduce", lambda x, *_: x):
        first, second = scales({"dp": 2})
    assert not torch.allclose(first["forward_scales"], second["forward_scales"], rtol=1e-3)


@pytest.mark.parametrize(
    ("strategy", "sizes", "options"),
    [
        ("megatron_sp", {"tp": 2, "dp": 2}, {}),
        ("tensor_parallel", {"tp": 2}, {"kv_heads": 1}),
        ("single", {"dp": 2, "pp": 2}, {"recompute": "full"}),
        ("megatron_sp", {"tp": 2, "dp": 2}, {"biases": True}),
        ("single", {"dp": 2}, {"qkv_bias": True}),
    ],
)
def test_bytes_of_magnitudes_are_those_of_the_closed_form(
    strategy: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    training = {"backend": "megatron", "micro_batches": 2}
    setting = {"strategy": strategy, "sizes": sizes, "batch": 8, "precision": "bf16", "training": training}
    measured = trace(model_options={**DELAYED, **options}, **setting).measurement(None)
    assert measured.formula_difference == []
    reduced = [row for row in measured.formula if row["purpose"] == "largest magnitudes"]
    layers = 2 // sizes.get("pp", 1)
    assert sorted(row["payload_bytes"] for row in reduced) == [4 * 2 * 4 * layers, 4 * 3 * 4 * layers]


def test_no_magnitude_is_taken_before_a_cast() -> None:
    options = {"precision": "bf16", "training": {"backend": "megatron"}}
    current = kernels(trace(model_options={**DELAYED, "fp8": "tensorwise"}, **options))
    delayed = kernels(trace(model_options=DELAYED, **options))
    assert (current["fp8_amax"], delayed["fp8_amax"]) == (24, 0)
    assert current["fp8_cast_both"] == delayed["fp8_cast_both_delayed_"] == 24
    assert delayed["fp8_update_scales_"] == 2


def test_a_model_has_four_matmuls_a_layer() -> None:
    module = model_preset("causal-transformer-tiny", DELAYED).build(Strategy(), 16)
    assert module.scaling.matmuls == 2 * 4  # type: ignore[union-attr]
