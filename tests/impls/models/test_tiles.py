"""Tiles of MLPs and losses: their numbers, their bytes, what is kept, and faults that others have had."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends import fully_shard
from spbench.impls.models.blocks import tiles
from spbench.impls.models.blocks.decoder_layer import DecoderBlock
from spbench.impls.models.blocks.feed_forward import MlpModule
from spbench.impls.registries import all_strategies, model_preset
from spbench.impls.tiles import Tiling
from tests.impls.models.test_recomputation import gradients, kernels, trace

GROUPED = "causal-transformer-tiny-gqa"
TILES = {"mlp_tile": 5, "loss_tile": 5}
SLOW = pytest.mark.slow


@pytest.mark.parametrize("tokens", [1, 7, 8, 64, 1000])
@pytest.mark.parametrize("longest", [1, 3, 8, 2000])
def test_tiles_are_few_alike_and_cover_all(tokens: int, longest: int) -> None:
    lengths = Tiling(longest).lengths(tokens)
    assert sum(lengths) == tokens
    assert len(lengths) == math.ceil(tokens / longest)
    assert len({*lengths[:-1]}) <= 1
    assert 0 < lengths[-1] <= lengths[0] <= longest
    # ALST's: torch.chunk with that number of chunks
    assert lengths == [len(chunk) for chunk in torch.empty(tokens).chunk(len(lengths))]


def test_liger_s_tiles_are_a_power_of_two() -> None:
    """32 parts of 475,000 tokens in Llama-3-8B, rounded up: 14,844 to 16,384."""
    lengths = model_preset("llama3-8b", {"loss_tile": "liger"}).loss_tiling.lengths(475_000)
    assert lengths == [16384] * 28 + [475_000 - 28 * 16384]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["zero3", pytest.param("zero2", marks=SLOW), "fsdp_flat"])
def test_weights_are_gathered_and_gradients_sent_once_not_once_a_tile(backend: str) -> None:
    options = TILES | {"recompute": "full", "checkpoints": "host"}
    sent = []
    for model_options in (options, {"recompute": "full"}):
        training = {"backend": backend, "micro_batches": 2}
        found = trace(model_options=model_options, sizes={"dp": 2}, batch=4, training=training)
        assert found.measurement(None).formula_difference == []
        sent.append(found.communication.counts)
    assert sent[0] == sent[1]


def test_an_mlp_runs_three_times_where_its_layer_is_recomputed_and_a_loss_once() -> None:
    """16 tokens are 4 tiles. Each of an MLP's has the two products of forward twice, and four of backward."""
    plain = kernels(trace(model_options={"layers": 2}))
    tiled = kernels(trace(model_options={"layers": 2, "mlp_tile": 4}))
    assert tiled["silu"] == 2 * 4 * 2 and plain["silu"] == 2  # noqa: PT018
    assert tiled["mm"] == plain["mm"] + 2 * (4 * (2 + 2 + 4) - (2 + 4))
    again = kernels(trace(model_options={"layers": 2, "mlp_tile": 4, "recompute": "full"}))
    assert again["silu"] == 2 * 4 * 3
    loss = kernels(trace(model_options={"layers": 2, "loss_tile": 4}))
    assert loss["mm"] == plain["mm"] + 3 * 3
    fpdt = kernels(trace(model_options={"layers": 2, "loss_tile": 4, "tiling": "fpdt"}))
    assert fpdt["mm"] == loss["mm"] + 4
    assert (fpdt["to_pageable_"], fpdt["from_pageable_"]) == (1, 4)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_loss_in_tiles_heeds_the_gradient_of_its_sum(at_once: bool) -> None:
    def each(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((x @ weight.mT).mT, labels, reduction="none")

    torch.manual_seed(0)
    x, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 7, 4), (5, 4))
    )
    labels, of_tokens = torch.randint(5, (1, 7)), torch.rand(1, 7, dtype=torch.float64)
    plain = torch.autograd.grad(3 * (each(x, weight, labels) * of_tokens).sum(), (x, weight))
    tiled, _ = tiles.loss_in_tiles(each, weight, x, labels, of_tokens, Tiling(3, backward_at_once=at_once))
    torch.testing.assert_close(torch.autograd.grad(3 * tiled, (x, weight)), plain)


def test_fpdt_s_sums_over_tiles_are_rounded_once() -> None:
    """257 gradients of bfloat16, of which each but the first is lost in a sum of that precision."""
    weight, sums = torch.zeros(1, dtype=torch.bfloat16), []
    for precise in (False, True):
        gradients = tiles.WeightGradients([weight], precise=precise)
        for each in (1.0, *[2.0**-9] * 256):
            gradients.add([weight.new_full((1,), each)])
        sums += [total.item() for total in gradients.whole() if total is not None]
    assert sums == [1.0, 1.5]


def test_gradients_with_dropout_are_those_without_tiles() -> None:
    plain, tiled = gradients(), gradients(**TILES, recompute="full")
    assert plain.keys() == tiled.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(tiled[name], gradient, rtol=1e-11, atol=1e-14)


def test_one_tile_s_intermediate_results_exist_at_once() -> None:
    """A step of 16 times the tokens needs 16 times the hidden states, and not more of an MLP or of logits."""

    def peak(seq_len: int, **options: Any) -> int:
        asked = {"layers": 1, "inner": 48 * 64, "vocabulary": 96 * 32, **options}
        return trace(seq_len=seq_len, model_options=asked).memory.peak().nbytes

    tiled = {"mlp_tile": 16, "loss_tile": 16, "cross_entropy": "in_place"}
    of_hidden = peak(1024, inner=1, vocabulary=96) - peak(256, inner=1, vocabulary=96)
    assert peak(1024, **tiled) - peak(256, **tiled) < 1.1 * of_hidden
    assert peak(1024) - peak(256) > 10 * of_hidden


def test_inference_makes_no_gradient() -> None:
    asked = {"model_options": {"layers": 2, **TILES}, "training": {"step": "inference"}}
    assert kernels(trace(**asked))["mm"] == 2 * (2 + 2 * 4) + 4


# -- faults that others have had --------------------------------------------------------------------------


@dataclass(frozen=True)
class PlantedPool:
    """A pool whose ranks have a fault while they run a job."""

    pool: RankPool
    plant: Callable[[pytest.MonkeyPatch], None]

    def run(self, sizes: Mapping[str, int], check: Any, case: Case, **how: Any) -> list[Any]:
        return self.pool.run(sizes, with_fault, check, case, self.plant, **how)


def with_fault(mesh: DeviceMesh, check: Any, case: Case, plant: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return check(mesh, case)


def row_with(pool: RankPool, plant: Any, case: Case, sizes: int = 1) -> VerifyRow:
    return verify_case(PlantedPool(pool, plant), case, sizes)  # type: ignore[arg-type]


def scaled_by_the_number_of_tiles(patch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's issue 8587: of 72 tokens 15 tiles, a mean in place of the sum."""
    made = tiles._gradients
    patch.setattr(
        tiles, "_gradients", lambda run, tile, weights, d_y, sums: made(run, tile, weights, d_y / 15, sums)
    )


def loss_scaled_by_the_number_of_tiles(patch: pytest.MonkeyPatch) -> None:
    made = tiles._loss_gradients

    def scaled(run: Any, given: Sequence[Tensor], *to: Any) -> Tensor:
        return made(run, (*given[:-1], given[-1] / 15), *to)

    patch.setattr(tiles, "_loss_gradients", scaled)


def gradient_of_the_last_tile_alone(patch: pytest.MonkeyPatch) -> None:
    def add(self: tiles.WeightGradients, gradients: list[Tensor]) -> None:
        self.sums = list(gradients)

    patch.setattr(tiles.WeightGradients, "add", add)


def tiles_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    def forward(ctx: Any, run: Any, lengths: Any, precise: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.lengths, ctx.precise, ctx.weights = run, lengths, precise, weights
        return torch.cat([run(tile) for tile in x.split(lengths, 1)][::-1], 1)

    patch.setattr(tiles._Tiles, "forward", staticmethod(forward))


@pytest.mark.parametrize(
    ("plant", "tensor"),
    [
        (scaled_by_the_number_of_tiles, "gradient of blocks"),
        (loss_scaled_by_the_number_of_tiles, "gradient of"),
        (gradient_of_the_last_tile_alone, "gradient of"),
        (tiles_in_the_wrong_order, "output hidden"),
    ],
)
@pytest.mark.parametrize("tiling", ["alst", "fpdt"])
def test_a_planted_fault_is_red(pool: RankPool, plant: Any, tensor: str, tiling: str) -> None:
    model = model_preset(GROUPED, TILES | {"tiling": tiling})
    row = row_with(pool, plant, Case(all_strategies()["single"], model, "model"))
    assert row.status == "RED"
    assert tensor in row.tensor + row.verdict, row


def hook_of_each_tile(patch: pytest.MonkeyPatch) -> None:
    """Each tile's backward accumulates in the weights."""

    def backward(run: Any, tile: Tensor, weights: Any, d_y: Tensor, sums: Any) -> Tensor:
        tile = tile.detach().requires_grad_()
        with torch.enable_grad():
            run(tile).backward(d_y)
        return tile.grad  # type: ignore[return-value]

    patch.setattr(tiles, "_gradients", backward)


def hook_of_no_tile(patch: pytest.MonkeyPatch) -> None:
    """Autograd does not know that tiles use weights."""
    patch.setattr(tiles.WeightsOf, "now", lambda self: [])


@pytest.mark.parametrize(
    ("plant", "reason"),
    [(hook_of_each_tile, "KeyError"), (hook_of_no_tile, "gave no gradient for some parameters")],
)
@pytest.mark.parametrize("backend", ["ddp", "megatron"])
def test_a_hook_of_the_weights_that_fires_once_a_tile_or_never_is_red(
    pool: RankPool, backend: str, plant: Any, reason: str
) -> None:
    case = Case(all_strategies()["single"], model_preset(GROUPED, {"mlp_tile": 5}), "model", backend=backend)
    row = row_with(pool, plant, case)
    assert row.status == "RED"
    assert reason in row.reason


def zero3_hook_of_each_tile(patch: pytest.MonkeyPatch) -> None:
    """The MLP is a unit of its own, which is called once a tile."""

    def forward(self: DecoderBlock, x: Tensor, places: Any) -> Tensor:
        mixed = self.mixer_end(self.mixer(self.mixer_norm(x), places), x)
        outputs = [self.mlp(tile) for tile in self.mlp_norm(mixed).split(5, 1)]
        return self.mlp_end(torch.cat(outputs, 1), mixed)

    patch.setattr(DecoderBlock, "forward", forward)
    patch.setattr(MlpModule, "forward", MlpModule._whole)
    patch.setattr(
        fully_shard, "units_of", lambda module, options: [block.mlp for block in module.blocks.values()]
    )


def zero3_hook_of_no_tile(patch: pytest.MonkeyPatch) -> None:
    """Each projection is a unit, and tiles do not call it as a module."""
    patch.setattr(
        fully_shard, "units_of", lambda module, options: [block.mlp.out for block in module.blocks.values()]
    )


@pytest.mark.parametrize(
    ("plant", "told"), [(zero3_hook_of_each_tile, "all_gather over sp"), (zero3_hook_of_no_tile, "DTensor")]
)
def test_weights_gathered_once_a_tile_or_never_are_red(pool: RankPool, plant: Any, told: str) -> None:
    case = Case(all_strategies()["ulysses"], model_preset(GROUPED, {"mlp_tile": 5}), "model", backend="zero3")
    row = row_with(pool, plant, case, 2)
    assert row.status == "RED"
    assert told in row.tensor + row.verdict + row.reason, row
