"""Casts to eight bits against a plain reference, and projections within the bound of their recipe.
Matmuls of experts and latents in eight bits: each expert as a projection of its own, bytes sent. Casts by
scales of earlier passes: values, the history, one scale on all ranks, bytes of all-reduces."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.setup import build_training, rank_inputs
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from spbench.impls.kernels import fp8_casts, fp8_delayed, fp8_gathered, fp8_grouped
from spbench.impls.kernels.fp8_casts import (
    E4M3,
    E5M2,
    E8M0,
    Quantized,
    Tile,
    fp8_amax,
    fp8_cast,
    fp8_cast_both,
)
from spbench.impls.kernels.fp8_delayed import (
    DelayedScaling,
    fp8_cast_both_delayed_,
    fp8_cast_delayed_,
    fp8_update_scales_,
)
from spbench.impls.kernels.fp8_gathered import project_gathered
from spbench.impls.kernels.fp8_grouped import fp8_amax_rows, fp8_cast_rows, grouped_project_fp8
from spbench.impls.kernels.fp8_projection import RECIPES, Fp8Recipe, mark_recipe
from spbench.impls.kernels.grouped_matmul import GROUPED_MATMULS
from spbench.impls.kernels.projection import project
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import initialize
from tests.grid import tabled
from tests.impls.backends.one_device import set_weights
from tests.impls.kernels.made import bytes_kept, made
from tests.impls.models.test_recomputation import kernels, trace

#: half the distance of neighbours, as a share of a number, and of the least normal number
HALF = {E4M3: 2.0**-4, E5M2: 2.0**-3}
LIBRARIES = ("torch", "transformer-engine")
#: of whose options each library has a recipe
PAIRS = [
    (library, name) for library in LIBRARIES for name in RECIPES
    if name != "delayed" and (library == "torch" or not name.startswith("rowwise"))
]  # fmt: skip


@cache
def numbers(dtype: torch.dtype) -> list[float]:
    """All finite numbers of a format, by its bits."""
    return [x for x in torch.arange(256, dtype=torch.uint8).view(dtype).double().tolist() if math.isfinite(x)]


def nearest(x: float, dtype: torch.dtype) -> float:
    """The number of a format that is nearest; of two, that whose last bit is 0."""
    # bits of one sign follow the numbers' order, so that an even place has an even last bit
    positive = sorted({abs(each) for each in numbers(dtype)})
    place = min(range(len(positive)), key=lambda i: (abs(positive[i] - abs(x)), i % 2))
    return math.copysign(positive[place], x)


def plain_cast(x: Tensor, dtype: torch.dtype, tile: Tile, power: bool) -> Iterator[tuple[int, int, float]]:
    """What each element counts as, by its place."""
    rows, columns = tile[0] or len(x), tile[1] or x.shape[1]
    for r in range(0, len(x), rows):
        for c in range(0, x.shape[1], columns):
            block = x[r : r + rows, c : c + columns]
            scale = torch.tensor(block.abs().max().item() / max(numbers(dtype)), dtype=torch.float32).item()
            scale = 2.0 ** math.ceil(math.log2(scale)) if power else scale
            for i in range(block.shape[0]):
                for j in range(block.shape[1]):
                    yield r + i, c + j, nearest(block[i, j].item() / scale, dtype) * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 4), (3, 2)])
@pytest.mark.parametrize("scales", [None, torch.float32, E8M0])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_cast_is_the_nearest_number_of_each_tile(
    dtype: torch.dtype, tile: Tile, scales: torch.dtype | None, transposed: bool
) -> None:
    x = (made(5, 7).detach() * torch.logspace(-9, 3, 7, dtype=torch.float64)).double()
    largest = fp8_amax(x) if tile == (0, 0) else None
    data, scale = fp8_cast(x, largest, dtype, tile, scales, transposed)
    of = x.mT if transposed else x
    got = data.double() * fp8_casts._spread(scale, of.shape, tile).double()
    expected = torch.zeros_like(of)
    for i, j, value in plain_cast(of, dtype, tile, scales is not None):
        expected[i, j] = value
    assert data.dtype == dtype
    assert data.is_contiguous()
    assert torch.equal(got, expected)


def test_a_cast_both_ways_is_two_casts() -> None:
    x = made(6, 10).detach().bfloat16()
    both = fp8_cast_both(x, None, E4M3, (1, 4), E8M0)
    one, other = (fp8_cast(x, None, E4M3, (1, 4), E8M0, each) for each in (False, True))
    for got, expected in zip(both, (*one, *other), strict=True):
        assert torch.equal(got.float(), expected.float())


def test_zeros_stay_zeros() -> None:
    data, scale = fp8_cast(torch.zeros(2, 4), None, E4M3, (1, 2), E8M0, False)
    assert not data.float().any()
    assert scale.float().isfinite().all()


def slack(x: Tensor, recipe: Fp8Recipe, tile: Tile, dtype: torch.dtype) -> Tensor:
    """How far a cast may move each element of x: half the distance of neighbours, beside the least normal
    number of its tile's scale. A scale that is a power of two may be twice as large."""
    rows, columns = tile[0] or len(x), tile[1] or x.shape[1]
    blocks = x.abs().unfold(0, min(rows, len(x)), rows).unfold(1, min(columns, x.shape[1]), columns)
    largest = blocks.amax((-1, -2)).repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(x)]
    finfo = torch.finfo(dtype)
    least = largest / finfo.max * finfo.tiny * (1 if recipe.scales is None else 2)
    return HALF[dtype] * torch.maximum(x.abs(), least) * (1 + 1e-6)


def out_of_bounds(library: str, recipe: Fp8Recipe) -> list[str]:
    """Which results of a projection are farther from float64 than casts can move them."""
    x, d_y = made(256, 256), made(256, 256, seed=1).detach()  # square, so that no shape finds a fault
    weight = nn.Parameter(made(256, 256, seed=2).detach())
    weight.spbench_fp8, weight.spbench_library = recipe, library  # type: ignore[attr-defined]
    y = project(x, weight)
    got = (y.detach(), *torch.autograd.grad(y, [x, weight], d_y))
    x, w = x.detach(), weight.detach()

    def by_recipe(a: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
        return a, slack(a.contiguous(), recipe, recipe.tile, dtype)

    def of_weight(b: Tensor, tile: Tile = recipe.weights) -> tuple[Tensor, Tensor]:
        return b.T, slack(b.contiguous(), recipe, tile, E4M3).T

    products = {
        "y": (by_recipe(x), of_weight(w)),
        "d_x": (
            by_recipe(d_y, recipe.gradients),
            of_weight(w.T, (0, 0) if recipe.wide_weight_gradient else recipe.weights),
        ),
        "d_W": (by_recipe(d_y.T, recipe.gradients), (x, by_recipe(x.T)[1].T)),
    }
    if recipe.wide_weight_gradient:
        products["d_W"] = (d_y.T, torch.zeros_like(d_y.T)), (x, 1e-12 * x.abs())
    return [
        name
        for (name, ((a, of_a), (b, of_b))), each in zip(products.items(), got, strict=True)
        if ((each - a @ b).abs() > of_a @ b.abs() + a.abs() @ of_b + of_a @ of_b).any()
    ]


@pytest.mark.parametrize(("library", "name"), PAIRS)
def test_a_projection_is_within_the_bound_of_its_recipe(library: str, name: str) -> None:
    assert out_of_bounds(library, RECIPES[name]) == []


@pytest.mark.parametrize(("library", "name"), [("torch", "tensorwise"), ("transformer-engine", "blockwise")])
def test_an_inverted_scale_leaves_the_bound(library: str, name: str) -> None:
    honest = fp8_casts._cast

    def inverted(*args: Any) -> tuple[Tensor, Tensor]:
        data, scale = honest(*args)
        return data, 1 / scale

    with mock.patch.object(fp8_casts, "_cast", inverted):
        assert out_of_bounds(library, RECIPES[name]) == ["y", "d_x", "d_W"]


@pytest.mark.parametrize(("library", "name"), [("torch", "tensorwise"), ("transformer-engine", "blockwise")])
def test_operands_that_are_not_transposed_leave_the_bound(library: str, name: str) -> None:
    cast, both = Fp8Recipe.cast, Fp8Recipe.cast_both

    def as_it_is(self: Fp8Recipe, *args: Any, transposed: bool = False) -> Quantized:
        return cast(self, *args)

    def twice(self: Fp8Recipe, *args: Any) -> tuple[Quantized, Quantized]:
        return (both(self, *args)[0],) * 2

    with mock.patch.multiple(Fp8Recipe, cast=as_it_is, cast_both=twice):
        assert out_of_bounds(library, RECIPES[name]) == ["d_x", "d_W"]


def test_what_is_kept_for_backward() -> None:
    x, weight = made(128, 256, dtype=torch.bfloat16), nn.Parameter(made(384, 256, dtype=torch.bfloat16))
    kept = {}
    for library, name in PAIRS:
        weight.spbench_fp8, weight.spbench_library = RECIPES[name], library  # type: ignore[attr-defined]
        kept[library, name] = bytes_kept(lambda: project(x, weight))
    elements, weights = x.numel(), weight.numel()
    assert kept["torch", "tensorwise"] == 2 * elements + 2 * 4  # x itself, and the largest of x and weight
    assert kept["torch", "rowwise"] == 2 * elements
    assert kept["transformer-engine", "tensorwise"] == elements + weights + 2 * 4
    of_blocks = elements // 128 * 4 + weights // 128**2 * 4
    assert kept["transformer-engine", "blockwise"] == elements + weights + of_blocks
    assert kept["transformer-engine", "mxfp8"] == (elements + weights) * 33 // 32


def gathered_errors(mesh: DeviceMesh, name: str, reduced: bool) -> tuple[float, float]:
    """How far the projection of all positions is from float64, forward and in its weight's gradient, as a
    share of what casts can move."""
    group, rank, n = mesh.get_group("tp"), mesh.get_local_rank("tp"), mesh.size()
    recipe, whole = RECIPES[name], made(2, 8 * n, 128).detach()
    whole[:, : whole.shape[1] // n] *= 100  # of one rank alone
    weight, d_y = nn.Parameter(made(128, 128, seed=2).detach()), made(2, 8 * n, 128, seed=3).detach()
    weight.spbench_fp8, weight.spbench_library = recipe, "transformer-engine"  # type: ignore[attr-defined]
    unreduced = mock.patch.object(fp8_gathered, "all_reduce", lambda x, *_: x)
    with nullcontext() if reduced else unreduced:
        x = whole.chunk(n, 1)[rank].clone().requires_grad_()
        y = project_gathered(x, weight, None, recipe, 1, group)
        (of_weight,) = torch.autograd.grad(y, [weight], d_y)
    rows, d_rows, w = whole.flatten(0, 1), d_y.flatten(0, 1), weight.detach()
    a, b = slack(rows, recipe, recipe.tile, E4M3), slack(w, recipe, recipe.weights, E4M3).T
    bound = a @ w.T.abs() + rows.abs() @ b + a @ b
    forward = ((y.detach().flatten(0, 1) - rows @ w.T).abs() / bound).max().item()
    exact = d_rows.T @ rows
    return forward, ((of_weight - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_what_is_gathered_in_eight_bits_is_within_the_bound(name: str, ranks: int) -> None:
    for forward, of_weight in LockstepRanks().run({"tp": ranks}, gathered_errors, name, True):
        assert forward <= 1
        assert of_weight < 0.1


def test_scales_that_are_not_of_all_ranks_leave_the_bound() -> None:
    worst = [each[0] for each in LockstepRanks().run({"tp": 2}, gathered_errors, "tensorwise", False)]
    assert max(worst) > 10


def loss_and_gradients(**options: Any) -> dict[str, Tensor]:
    model = model_preset("causal-transformer-tiny", {"separate_projections": True, **options})
    module = model.build(Strategy(), 16)
    initialize(module, 0, deviation=0.3)
    loss = module(model.inputs(2, 16, torch.Generator().manual_seed(1)))["loss"]
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("recompute", ["operators", "full"])
def test_recomputation_changes_nothing(fp8: str, recompute: str) -> None:
    plain, again = loss_and_gradients(fp8=fp8), loss_and_gradients(fp8=fp8, recompute=recompute)
    exact = loss_and_gradients()
    for name, gradient in plain.items():
        assert torch.equal(again[name], gradient)
    assert 1e-4 < (plain["loss"] - exact["loss"]).abs() / exact["loss"] < 0.05


def test_casts_of_kept_matmuls_and_of_shared_inputs_are_made_once() -> None:
    """7 weights a layer, with 4 inputs; the matmuls of 3 weights, with 3 inputs, run again."""
    setting = {"model_options": {"separate_projections": True, "fp8": "tensorwise", "layers": 1}}
    plain = kernels(trace(**setting))
    setting["model_options"]["recompute"] = "operators"
    again = kernels(trace(**setting))
    assert plain["fp8_mm"] == 3 * 7
    assert again["fp8_mm"] - plain["fp8_mm"] == 3
    assert again["fp8_amax"] == plain["fp8_amax"] == 4 + 7 + 7
    assert plain["fp8_cast"] == (4 + 7) + (4 + 7)
    assert again["fp8_cast"] - plain["fp8_cast"] == 3 + 3


@pytest.mark.parametrize("backend", ["zero3", "fsdp1", "fsdp_flat", "zero1"])
def test_every_backend_multiplies_in_eight_bits(backend: str) -> None:
    options = {"fp8": "rowwise", "layers": 1, "separate_projections": True}
    training, sizes = {"backend": backend}, {"dp": 2}
    counted = kernels(trace(model_options=options, precision="bf16", sizes=sizes, batch=2, training=training))
    assert counted["fp8_mm"] == 3 * 7


def test_heads_of_keys_that_ranks_share_are_in_eight_bits_too() -> None:
    options = {"fp8": "rowwise", "layers": 1, "kv_heads": 1}
    sizes = {"tp": 2}
    counted = kernels(trace(model_options=options, precision="bf16", strategy="tensor_parallel", sizes=sizes))
    assert counted["fp8_mm"] == 3 * 4


def test_weights_are_cast_in_the_first_micro_batch_of_a_step() -> None:
    options = {"fp8": "tensorwise", "library": "transformer-engine", "layers": 1}
    casts = []
    for micro_batches, steps in ((1, 1), (3, 1), (3, 2)):
        training = {"micro_batches": micro_batches, "steps": steps, "backend": "megatron"}
        counted = kernels(trace(model_options=options, precision="bf16", batch=3, training=training))
        casts.append(counted["fp8_cast_both"])
    assert casts[0] == 4 + 4 + 4  # of inputs, of gradients, of weights
    assert casts[1] == casts[2] == 3 * (4 + 4) + 4


def test_weights_of_interleaved_stages_are_cast_once_a_step_too() -> None:
    options = {"fp8": "tensorwise", "library": "transformer-engine", "layers": 4}
    schedule = {"schedule": "interleaved", "virtual_stages": 2, "overlap_p2p_communication": True}
    training = {"micro_batches": 4, "backend": "megatron", **schedule}
    sizes = {"pp": 2}
    counted = kernels(trace(model_options=options, precision="bf16", batch=4, sizes=sizes, training=training))
    assert counted["fp8_cast_both"] == 2 * (4 * (4 + 4) + 4)


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


@tabled(__file__, "bytes_are_those_of_the_closed_form")
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


@tabled(__file__, "bytes_of_magnitudes_are_those_of_the_closed_form")
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
