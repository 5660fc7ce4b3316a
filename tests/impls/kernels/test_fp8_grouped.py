"""Matmuls of experts and latents in eight bits: each expert as a projection of its own, bytes sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from spbench.bench.measure.trace.operator_prices import GROUPED_MATMULS
from spbench.impls.kernels import fp8_grouped
from spbench.impls.kernels.fp8_grouped import fp8_amax_rows, fp8_cast_rows, grouped_project_fp8
from spbench.impls.kernels.fp8_projection import RECIPES
from spbench.impls.kernels.projection import project
from spbench.impls.models.model import model_preset
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
    assert each[1].grad is not None
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


@pytest.mark.parametrize("options", [{"fp8": "tensorwise"}, {"fp8": "delayed", **OPTIONS}])
def test_other_experts_in_eight_bits_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experts in eight bits need library: transformer-engine"):
        model_preset("moe-tiny", options)
