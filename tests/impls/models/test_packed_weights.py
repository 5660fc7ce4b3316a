"""Frozen weights in few bits: what they unpack to, ranks beside one device, bytes and memory."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.kernels.packed_weights import BLOCK, BLOCK_OF_SCALES, NF4, Packed, unpack_weight
from spbench.impls.layout import mark_shard, shard_of
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import Model, model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.training.step import initialize
from tests.measure.engines.cells import assert_real_ranks_send_the_same
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.planting import planted
from tests.slow import mostly_slow, slow

MODEL = "causal-transformer-tiny-gqa"
#: rows of 64 and 128 features, so that a rank of four has whole numbers of float64 and whole blocks
SIZES = {"hidden": 64, "inner": 128, "head_dim": 16}
STRATEGIES = ("tensor_parallel", "megatron_sp", "ulysses", "ring_attention")
SPARSE = {"experts": 4, "experts_per_token": 2, "shared_inner": 32, "expert_inner": 16}


def packed(bits: int, **options: Any) -> Model:
    return model_preset(MODEL, {"lora_rank": 4, "frozen_bits": bits, **SIZES, **options})


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in four bits, and its scales, operation by operation."""
    blocks = weight.double().view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    codes = (blocks / largest[:, None]).unsqueeze(-1).sub(torch.tensor(NF4)).abs().argmin(-1)
    of_scales = largest.split(BLOCK_OF_SCALES)
    wide = torch.stack([each.amax() for each in of_scales]).float()
    narrow = torch.cat([(s / w * 255).round().to(torch.uint8) for s, w in zip(of_scales, wide, strict=True)])
    words = sum(codes.view(-1, 4)[:, at] << 4 * at for at in range(4))
    assert isinstance(words, Tensor)
    numbers = (words << 16).to(torch.int32).view(torch.float32).view(len(weight), -1)
    return numbers, torch.cat((wide.view(torch.uint8), narrow))


def test_what_was_packed_is_near_to_what_is_unpacked() -> None:
    """Half the widest gap between codes (0.152), of the largest of a block, and a level of its scale."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    numbers, scales = _quantized(weight)
    assert scales.numel() == 96 * 256 // 64 + 4 * 2
    largest = weight.view(-1, BLOCK).abs().amax(1, keepdim=True)
    away = (unpack_weight(numbers, scales, 4) - weight).view(-1, BLOCK).abs() / largest
    assert 0.05 < away.max() < 0.152 + 1 / 255
    # the first 16 of the bits of float32, which a conversion would change where they are no number
    words = (numbers.view(torch.int32) >> 16).to(torch.int16)
    halves = unpack_weight(words.view(torch.bfloat16), scales, 4)
    assert halves.dtype == torch.bfloat16
    torch.testing.assert_close(halves.float(), unpack_weight(numbers, scales, 4), rtol=2**-8, atol=1e-9)
    wrong = unpack_weight(numbers.flip(0), scales, 4)
    assert (wrong - weight).abs().max() > 0.05


def test_eight_bits_have_a_scale_a_row() -> None:
    codes = torch.tensor([[127, -127, 0, 1], [64, -1, -64, 5]])
    words = (codes[:, ::2] & 255) | (codes[:, 1::2] & 255) << 8
    numbers = (words << 16).to(torch.int32).view(torch.float32)
    scales = torch.tensor([2.0, 127.0]).view(torch.uint8)
    expected = codes * torch.tensor([[2 / 127], [1.0]])
    torch.testing.assert_close(unpack_weight(numbers, scales, 8), expected)


@pytest.mark.parametrize("n", mostly_slow((1, 2, 4), 2))
@pytest.mark.parametrize(
    "strategy", mostly_slow(("tensor_parallel", "megatron_sp", "ulysses"), "megatron_sp")
)
@pytest.mark.parametrize(
    "options",
    [{"recompute": "full", "qkv_bias": True}, slow({"separate_projections": True})],
)
def test_ranks_compute_what_one_device_does(
    pool: RankPool, strategy: str, n: int, options: dict[str, Any]
) -> None:
    assert_green(pool, Case(strategy_class(strategy), packed(4, **options), "model"), n)


@pytest.mark.parametrize("strategy", ["megatron_sp", slow("ulysses")])
def test_routed_experts_are_not_packed_and_shared_ones_are(pool: RankPool, strategy: str) -> None:
    assert_green(pool, Case(strategy_class(strategy), packed(4, **SPARSE), "model"), 2)


@pytest.mark.parametrize("backend", mostly_slow(("ddp", "zero2", "zero3", "megatron"), "zero3"))
def test_backends_gather_what_is_packed(pool: RankPool, backend: str) -> None:
    assert_green(pool, Case(strategy_class("ulysses"), packed(8), "model", backend=backend), 2)


def test_real_ranks_send_what_virtual_ones_do(pool: RankPool) -> None:
    cell = {
        "model": MODEL,
        "strategy": "single",
        "sizes": {"dp": 2},
        "batch": 4,
        "seq_len": 24,
        "precision": "bf16",
    }
    options = {"lora_rank": 4, "frozen_bits": 4, **SIZES}
    cell |= {"model_options": options, "training": {"backend": "zero3"}}
    assert_real_ranks_send_the_same(pool, Cell.model_validate(cell))
    with pytest.raises(ValueError, match="numbers of 16 bits hold packed weights; set precision"):
        Cell.model_validate({**cell, "precision": "fp32"})  # where they would take twice the bytes


def _of_the_other_rank(self: Any, honest: Any, strategy: Strategy, *sizes: Any) -> nn.Module:
    """Each rank has the part of another one of what is packed."""
    module: nn.Module = honest(strategy, *sizes)
    for each in module.modules():
        for p in each._parameters.values() if hasattr(each, "packed_bits") else ():
            if p is not None and (shard := shard_of(p)) is not None:
                mark_shard(p, replace(shard, index=(shard.index + 1) % shard.parts))
    return module


OfTheOtherRank = planted("OfTheOtherRank", CausalTransformerModel, build=_of_the_other_rank)


def test_packed_parts_of_another_rank_are_red(pool: RankPool) -> None:
    model = OfTheOtherRank(**vars(packed(4)))
    assert_red(pool, Case(TensorParallel, model, "model"), 2)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rank_holds_packed_weights_and_their_scales(bits: int) -> None:
    options = {"lora_rank": 4, "frozen_bits": bits, **SIZES}
    cell = Cell(model=MODEL, strategy="single", batch=1, seq_len=24, precision="bf16", model_options=options)
    module = packed(bits).build(Strategy(), 24)
    frozen = [p for p in module.parameters() if not p.requires_grad]
    scales = [b.nbytes for name, b in module.named_buffers() if "scales_" in name]
    trained = [2 * p.numel() for p in module.parameters() if p.requires_grad]
    held = trace(cell).memory.peak().held["parameters"]
    assert held == sum(map(rounded, trained)) + sum(rounded(2 * p.numel()) for p in frozen) + sum(
        map(rounded, scales)
    )
    per_weight = bits / 8 + (4 / 64 if bits == 8 else (1 + 4 / 256) / BLOCK)
    weights = sum(p.numel() for p in frozen if hasattr(p, "spbench_library")) * 16 // bits
    assert sum(scales) + weights * bits / 8 == pytest.approx(weights * per_weight, rel=0.1)


@pytest.mark.parametrize(("recompute", "times"), [("none", 2), ("full", 3)])
def test_each_use_unpacks_a_weight(recompute: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward and in backward, and once more where a layer is recomputed."""
    unpacked, honest = Counter[int](), Packed.unpacked

    def counted(self: Packed, weight: Tensor) -> Tensor:
        unpacked[id(weight)] += 1
        return honest(self, weight)

    monkeypatch.setattr(Packed, "unpacked", counted)
    model = packed(4, recompute=recompute)
    module = model.build(Strategy(), 24)
    initialize(module, seed=0)
    module(model.inputs(1, 24, torch.Generator().manual_seed(0)))["loss"].backward()
    assert set(unpacked.values()) == {times}
    assert len(unpacked) == 4 * model.layers  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"frozen_bits": 5}, "frozen_bits is 4, 8 or 16"),
        ({"lora_rank": 0}, "below 16 needs lora_rank"),
        ({"mlp_tile": 8}, "MLPs without mlp_tile"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        packed(4, **options)
