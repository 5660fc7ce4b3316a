"""Adapters of low rank: what is trained, what is kept, and ranks beside one device.
Frozen weights in few bits: what they unpack to, ranks beside one device, bytes and memory."""

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
from spbench.impls.kernels.grouped_matmul import grouped_project, stacked_project
from spbench.impls.kernels.packed_weights import BLOCK, BLOCK_OF_SCALES, NF4, Packed, unpack_weight
from spbench.impls.kernels.projection import project
from spbench.impls.layout import mark_shard, shard_of
from spbench.impls.models.blocks.adapters import OpeningAdapters
from spbench.impls.models.blocks.experts import MixtureModule
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import Model
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import Linear
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.training.step import initialize
from tests.measure.verify.assertions import assert_red
from tests.measure.verify.expert_faults import in_each_block
from tests.measure.verify.planting import planted

MODEL, RANK = "causal-transformer-tiny-gqa", 4


def adapted(**options: Any) -> CausalTransformerModel:
    model = model_preset(MODEL, {"lora_rank": RANK, **options})
    assert isinstance(model, CausalTransformerModel)
    return model


TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj", "experts")
ALL = {"lora_rank": RANK, "lora_targets": TARGETS, "shared_inner": 24}


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


OfTheNext = planted(CausalTransformerModel, build=in_each_block(_of_the_next))
SummedOverAll = planted(CausalTransformerModel, build=in_each_block(_summed_over_all))
Unscaled = planted(Ulysses, linear_out=_unscaled)
AdapterNotSummed = planted(TensorParallel, enter=_not_entered)


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

WHOLE = {"lora_rank": RANK, "lora_whole": ["embedding", "head"]}


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


#: rows of 64 and 128 features, so that a rank of four has whole numbers of float64 and whole blocks
SIZES = {"hidden": 64, "inner": 128, "head_dim": 16}


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


def _of_the_other_rank(self: Any, honest: Any, strategy: Strategy, *sizes: Any) -> nn.Module:
    """Each rank has the part of another one of what is packed."""
    module: nn.Module = honest(strategy, *sizes)
    for each in module.modules():
        for p in each._parameters.values() if hasattr(each, "packed_bits") else ():
            if p is not None and (shard := shard_of(p)) is not None:
                mark_shard(p, replace(shard, index=(shard.index + 1) % shard.parts))
    return module


OfTheOtherRank = planted(CausalTransformerModel, build=_of_the_other_rank)


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
