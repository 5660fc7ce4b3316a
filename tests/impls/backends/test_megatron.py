"""The backend ``megatron`` with its options: values, planted faults, closed form, bytes held."""

import weakref
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters, plan
from spbench.bench.measure.engines.tracing import only_plain_traces
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.memory.allocator import GRANULE
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends import main_gradients
from spbench.impls.backends.backend import Backend
from spbench.impls.backends.buffer_layout import laid_out
from spbench.impls.backends.main_gradients import GradientBuffer, MainGradients
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.optimizer import PRECISIONS
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.pipeline import StageRun
from spbench.impls.training.step import Training
from spbench.impls.training.turns import Turns
from tests.impls.backends.one_device import (
    HEAVY,
    LIMIT,
    assert_right,
    cell,
    errors_of_rank,
)
from tests.measure.verify import backend_faults as faults
from tests.slow import slow

SHARDED = {"distributed_optimizer": True}
#: buckets of a few hundred elements, so that the tiny models have several
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 700}
GATHERED_LATE = {**SHARDED, **BUCKETS, "overlap_param_gather": True}
INSTANCES = {**GATHERED_LATE, "num_distributed_optimizer_instances": 2}


def megatron(
    strategy: str = "lasp", micro_batches: int = 2, options: dict[str, Any] | None = None, **changed: Any
) -> Cell:
    training = {"backend": "megatron", "micro_batches": micro_batches, **(options or {})}
    return cell("megatron", strategy, **{"training": training, **changed})


# -- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "strategy", "sizes", "options"),
    [
        (faults.NormOfEveryCopy, "tensor_parallel", {"dp": 2, "tp": 2}, SHARDED),
        slow(faults.NormOfEveryCopy, "single", {"dp": 2}, {}),
        slow(faults.NormOfOneRank, "single", {"dp": 2}, SHARDED),
    ],
)
def test_a_wrong_norm_is_seen(
    pool: RankPool, fault: type[Backend], strategy: str, sizes: dict[str, int], options: Any
) -> None:
    """And gradients that it has clipped by a wrong factor give other weights after one more step alone, since
    the first update of Adam is the same for all factors."""
    for errors in pool.run(sizes, errors_of_rank, megatron(strategy, 2, options, sizes=sizes), fault):
        assert errors["norm 0 of all"] > 1e-3
        assert max(error for name, error in errors.items() if name.startswith("gradient 0")) < LIMIT


@pytest.mark.parametrize("largest", [0.0, 1e9])
def test_gradients_that_are_not_clipped(pool: RankPool, largest: float) -> None:
    asked = megatron("single", 2, {**SHARDED, "clip_grad": largest}, sizes={"dp": 2})
    assert_right(pool, asked, Megatron)
    plan_of = plan(asked).traffic[0]
    assert ("norm over a stage" in {t.purpose for t in plan_of}) == bool(largest)


# -- bytes sent and held ----------------------------------------------------------------------------------


ON_EIGHT: dict[str, Any] = {"sizes": {"dp": 8}, "batch": 8, "precision": "bf16"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("options", "state"), [({}, 12.0), (SHARDED, 12 / 8), (INSTANCES, 12 / 4)])
def test_bytes_a_parameter(options: dict[str, Any], state: float) -> None:
    """18 bytes a parameter, or 6 + 12/N, without the moments until the first step's update."""
    for moments, share in (("kept", 1.0), ("later", 1 / 3)):
        options = {**options, "moments": moments, "gradient_accumulation_fusion": False}
        asked = megatron("lasp", 1, options, **ON_EIGHT, model_options=HEAVY)
        log, elements = tracing.trace(asked).memory, model_parameters(asked)
        held: Counter[str] = Counter()
        for event in log.events[: log.step_start]:
            held[log.tags.get(event - 1, "")] += log.sizes[event - 1] if event > 0 else 0
        assert held["parameters"] == pytest.approx(2 * elements, rel=0.001)
        assert held["gradients"] == pytest.approx(4 * elements, rel=0.001)
        assert held["optimizer_state"] == pytest.approx(state * share * elements, rel=0.03)


@pytest.mark.slow
def test_hidden_communication_of_an_overlapped_step() -> None:
    of = {**ON_EIGHT, "cluster": "dgx-a100", "model_options": {**HEAVY, "layers": 8}}
    asked = [megatron("lasp", 1, o, **of) for o in (SHARDED, {**GATHERED_LATE, "bucket_size": 400_000})]
    plain, overlapped = (VirtualEngine().measure(each) for each in asked)
    assert plain.breakdown["hidden_communication_s"] == 0
    assert overlapped.breakdown["hidden_communication_s"] > 0


# -- fused accumulation -----------------------------------------------------------------------------------


class _AddsItsOwn(torch.autograd.Function):
    """x W^T, whose backward adds W's gradient to ``W.main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad += gradient.T @ x
        ctx.weight.grad_added_to_main_grad = True
        made = torch.zeros_like if ctx.weight.zero_out_wgrad else torch.empty_like
        return gradient @ weight, made(weight).fill_(0 if ctx.weight.zero_out_wgrad else torch.nan)


@pytest.mark.parametrize("cls", [MainGradients, faults.FlagIgnored])
@pytest.mark.parametrize("tied", [False, True])
def test_what_layers_add_themselves_is_added_once(cls: type[MainGradients], tied: bool) -> None:
    table = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    head = table if tied else nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
    parameters = list({table: None, head: None})
    layouts = laid_out([p.numel() for p in parameters], [False] * len(parameters), None, None)
    buffer = GradientBuffer(None, parameters, torch.float64, layouts, False)
    added_anyway = {table} if tied else set()
    gradients = cls([buffer], overlapped=False, fused=True, added_anyway=added_anyway)
    tokens = torch.tensor([0, 3, 3])
    expected = [torch.zeros_like(p) for p in parameters]
    for scale in (1.0, 2.0):
        gradients.expect_last(parameters if scale == 2.0 else [])
        loss = (scale * F.linear(F.embedding(tokens, table), head)).pow(2).sum()
        for total, made in zip(expected, torch.autograd.grad(loss, parameters), strict=True):
            total += made
        (scale * _AddsItsOwn.apply(F.embedding(tokens, table), head)).pow(2).sum().backward()
    gradients.finish()
    right = all(torch.allclose(buffer.views[p], e) for p, e in zip(parameters, expected, strict=True))
    # of a tied weight, what autograd was given for the head is zero, and adding it is right
    assert right == (cls is MainGradients or tied)
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_alone_scales_the_gradients_of_its_experts(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_gradients, "GRADIENT_SCALE", 0.5)
    layouts = laid_out([4], [False], None, None)
    buffer = GradientBuffer(None, [nn.Parameter(torch.ones(4))], torch.float32, layouts, False, scaled=scaled)
    buffer.gradients.fill_(2.0)
    buffer.buckets[0].reduce(overlapped=False)
    assert buffer.gradients.tolist() == [1.0 if scaled else 2.0] * 4


def test_without_fusion_layers_are_given_nothing() -> None:
    for fused in (True, False):
        module = nn.Linear(3, 2)
        options = {"gradient_accumulation_fusion": fused}
        Training(module, Strategy(), PRECISIONS["fp32"], backend="megatron", backend_options=options)
        assert hasattr(module.weight, "main_grad") == fused
        assert not hasattr(module.bias, "main_grad")


def test_half_precision_weights_follow_float32_ones() -> None:
    """An update too small for bfloat16 is not lost."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    how: Any = {"backend": "megatron", "backend_options": SHARDED, "learning_rate": 2**-10}
    training = Training(module, Strategy(), PRECISIONS["bf16"], **how)
    for _ in range(4):
        training.backend.zero()
        training.backend.begin_last_backward(module)
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        training.backend.synchronize()
        training.backend.step()
    assert module.weight.item() == pytest.approx(1 - 4 * 2**-10, abs=2**-9)
    assert module.weight.item() < 1


# -- in pipelines -----------------------------------------------------------------------------------------

INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


def in_stages(options: dict[str, Any], **changed: Any) -> Cell:
    options = {"gradient_accumulation_fusion": False, **options}
    changed = {"sizes": {"pp": 2}, "model": "causal-transformer-tiny", "batch": 8, **changed}
    return megatron("single", 4, options, **changed, model_options={"layers": 4, "tied": True})


def test_ranks_begin_to_gather_a_chunk_while_the_first_begins_the_one_before() -> None:
    """--align-param-gather: rank r is r forwards behind the first, so it looks r forwards ahead."""
    ranks = [Turns(rank, 2, 4, 4) for rank in range(2)]
    for rank, turns in enumerate(ranks):
        begun = {number: chunk for number in range(len(turns)) if (chunk := turns.gathered(number))}
        assert begun == {2 - rank: 2, 4 - rank: 3}
        assert [turns.forwards[number + rank] for number in begun] == [(1, 0), (2, 0)]


@pytest.mark.slow
def test_aligned_gathers_of_weights_are_waited_for_less() -> None:
    times = {}
    for aligned in (True, False):
        options = {**INTERLEAVED, **GATHERED_LATE, "virtual_stages": 3, "align_param_gather": aligned}
        asked = megatron("single", 4, options, sizes={"dp": 2, "pp": 2}, batch=8, model_options={"layers": 6})
        asked = asked.model_copy(update={"cluster": "dgx-h100"})
        times[aligned] = VirtualEngine().measure(asked).step_time_s
    assert times[True] < times[False]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "in_flight"), [({}, 2), (INTERLEAVED, 4)])
def test_outputs_that_were_sent_are_freed(options: dict[str, Any], in_flight: int) -> None:
    """At the first stage's peak: of every micro-batch in flight, and of an output a single element stays."""
    asked = in_stages(options, precision="bf16", seq_len=512)
    with only_plain_traces():
        freed = tracing.trace(asked).memory.peak()
        with mock.patch.object(Megatron, "frees_sent_outputs", False):
            kept = tracing.trace(asked).memory.peak()
    hidden = 2 * 512 * 48 * 2  # 2 samples, 48 features, 2 bytes
    assert kept.nbytes - freed.nbytes == in_flight * (hidden - GRANULE)


def test_a_sent_gradient_lives_during_the_next_backward() -> None:
    """As input_tensor_grad, a variable of Megatron-Core's loop, does."""
    alive, backward = [], StageRun.backward
    sent: list[weakref.ref[Tensor]] = []

    def watched(self: StageRun, *args: Any, **last: bool) -> Tensor | None:
        alive.extend(ref() is not None for ref in sent[-1:])
        d_x = backward(self, *args, **last)
        assert d_x is not None
        sent.append(weakref.ref(d_x))
        return d_x

    with only_plain_traces(), mock.patch.object(StageRun, "backward", watched):
        tracing.trace(in_stages({}), rank=1)
    assert alive == [True] * 3
    assert not any(ref() is not None for ref in sent)
