"""Planted faults in every data-parallel backend; each stage of ZeRO holds less than the one before it. Where
parameters lie in Megatron-Core's buffers, by hand. What Megatron-Core's stages keep of the hidden states that
they received.

The backend ``megatron`` with its options: wrong norms, bytes held, fused accumulation, stages.
"""

import weakref
from collections import Counter
from collections.abc import Callable
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
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends import main_gradients
from spbench.impls.backends.backend import Backend
from spbench.impls.backends.buckets import FIRST_BUCKET_BYTES, BucketedGradients
from spbench.impls.backends.buffer_layout import BucketLayout, Sharding, laid_out
from spbench.impls.backends.main_gradients import GradientBuffer, MainGradients
from spbench.impls.backends.megatron import Megatron
from spbench.impls.backends.optimizer import PRECISIONS
from spbench.impls.registries import all_backends, model_preset, strategy_class
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.training.pipeline import StageRun
from spbench.impls.training.step import Training
from spbench.impls.training.turns import Turns
from tests.cells import make_cell
from tests.impls.backends.one_device import (
    HEAVY,
    LENGTH,
    LIMIT,
    assert_right,
    cell,
    errors_of_rank,
    heavy,
    heavy_run,
    trained,
)
from tests.measure.verify import backend_faults as faults
from tests.measure.verify.assertions import assert_green
from tests.measure.verify.backend_faults import NormWithoutExperts
from tests.slow import mostly_slow, slow


@pytest.mark.parametrize("backend", [name for name, cls in all_backends().items() if not cls.pipelined])
def test_whole_models_only(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"the backend {backend} .* no pipeline stages; use pp 1"):
        VirtualEngine().measure(cell(backend, "single", 2, sizes={"pp": 2}))


@pytest.mark.parametrize("n", mostly_slow((1, 3, 4), 4))
@pytest.mark.parametrize(
    "backend", mostly_slow(sorted({*all_backends()} - {"legacy_ddp"}), "zero3", "fsdp_flat")
)
def test_the_checker_is_green(pool: RankPool, backend: str, n: int) -> None:
    for strategy, model in (("lasp", "tnl-tiny"), ("ulysses", "causal-transformer-tiny")):
        case = Case(strategy_class(strategy), model_preset(model), "model", seq_len=LENGTH, backend=backend)
        assert_green(pool, case, n)


def test_an_unsharded_buffer_has_no_padding() -> None:
    assert laid_out([100, 30, 50], [False] * 3, None, None) == [BucketLayout(0, 180, (2, 1, 0), (0, 50, 80))]
    buckets = laid_out([100, 30, 50], [False] * 3, 60, None)
    assert [(b.start, b.end, b.members) for b in buckets] == [(0, 80, (2, 1)), (80, 180, (0,))]


def test_a_sharded_buffer_is_padded() -> None:
    """Starts of parameters to multiples of 64 elements, ends of buckets to those of the ranks and of 128."""
    [bucket] = laid_out([100, 30, 50], [False] * 3, None, Sharding(3))
    assert (bucket.starts, bucket.end) == ((0, 64, 128), 384)
    assert bucket.shard(1, 3) == (128, 256)
    assert laid_out([100], [False], None, Sharding(8, high_bandwidth=True))[0].end == 2**16


def test_a_tied_embedding_has_a_bucket_of_its_own() -> None:
    """At the buffer's end on the first stage, at its beginning on the last, and cut alike."""
    for elements, alone in (([500, 30], [True, False]), ([30, 500], [False, True])):
        buckets = laid_out(elements, alone, None, Sharding(4))
        assert [b.members for b in buckets] == [(1,), (0,)]
        tied = buckets[1 - alone.index(True)]
        assert (tied.end - tied.start, tied.starts[0] - tied.start) == (512, 0)
    assert len(laid_out([500, 30], [True, False], None, None)) == 1


HIDDEN = 2 * 64 * 48 * 2  # of a micro-batch: 2 samples, 64 positions, 48 features, 2 bytes


def left(training: dict[str, Any]) -> dict[int, int]:
    """Bytes at the end of a step, by rank of two stages."""
    training = {"backend": "megatron", "micro_batches": 2, **training}
    four = {"layers": 4}
    asked = make_cell("gpt3-tiny", "single", {"pp": 2}, 4, 64, model_options=four, training=training)
    return {
        of["rank"]: of["allocated_bytes"] for of in VirtualEngine().measure(asked).by_class if of["step"] == 1
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("training", "received"),
    [({}, {0: 0, 1: 1}), ({"schedule": "interleaved", "virtual_stages": 2}, {0: 1, 1: 2})],
    ids=["1f1b", "interleaved"],
)
def test_the_last_input_of_each_stage_and_its_gradient_stay(
    training: dict[str, Any], received: dict[int, int]
) -> None:
    with only_plain_traces():
        kept = left(training)
        with mock.patch.object(Megatron, "keeps_stage_inputs", False):
            freed = left(training)
    assert {rank: kept[rank] - freed[rank] for rank in kept} == {
        r: 2 * n * HIDDEN for r, n in received.items()
    }


def test_each_stage_of_zero_holds_less() -> None:
    peaks = {name: heavy_run(name, 8).peak_memory_bytes or 0 for name in all_backends()}
    assert peaks["zero3"] < peaks["zero2"] < peaks["zero1"] < peaks["ddp"], peaks


#: bytes a parameter of weights and of optimizer state, in fp16 on n ranks: half weights 2, float32 weights 4,
#: moments 8, float32 gradients where they are kept 4
HELD: dict[str, Callable[[int], tuple[float, float]]] = {
    "legacy_ddp": lambda n: (2, 4 + 8),
    "unwrapped": lambda n: (2, 4 + 8),
    "ddp": lambda n: (2, 4 + 8 + 4),
    "zero1": lambda n: (2, (4 + 8 + 4) / n),
    "zero2": lambda n: (4 / n, 8 / n),
    "zero3": lambda n: (4 / n, 8 / n),
    "deepspeed_zero1": lambda n: (2, (4 + 8) / n),
    "deepspeed_zero2": lambda n: (2, (4 + 8) / n),
    "deepspeed_zero3": lambda n: (2 / n, (4 + 8) / n),
    "megatron": lambda n: (2, 4 + 8),
    "fsdp_flat": lambda n: (0, (4 + 8) / n),
    "fsdp1": lambda n: (0, (4 + 8) / n),
    "megatron_fsdp": lambda n: (2 / n, (4 + 8) / n),
}


@pytest.mark.parametrize("n", mostly_slow((2, 8), 8))
@pytest.mark.parametrize("backend", all_backends())
def test_what_is_held_between_steps(backend: str, n: int) -> None:
    at_peak, elements = heavy_run(backend, n).peak_held, model_parameters(heavy(backend, n))
    weights, state = HELD[backend](n)
    # small tensors and padding take more than their share
    assert at_peak["parameters"] == pytest.approx(weights * elements, rel=0.02)
    assert at_peak["optimizer_state"] == pytest.approx(state * elements, rel=0.02)


def test_a_bucket_is_sent_as_soon_as_it_is_full() -> None:
    full, last = (nn.Parameter(torch.empty(FIRST_BUCKET_BYTES // 4, device="meta")) for _ in range(2))
    buckets = BucketedGradients([(None, [last, full])], [last, full]).buckets
    assert [bucket.parameters for bucket in buckets] == [[full], [last]]


def test_outputs_are_freed_where_the_library_does() -> None:
    """Megatron-LM's deallocate_pipeline_outputs."""
    assert [name for name, cls in all_backends().items() if cls.frees_sent_outputs] == ["megatron"]


def test_a_norm_that_leaves_experts_out_is_seen(pool: RankPool) -> None:
    sizes, options = {"dp": 2, "sp": 2, "ep": 2}, {"distributed_optimizer": True}
    asked = trained("megatron", "ulysses", sizes, options=options, model="moe-tiny")
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, NormWithoutExperts):
        assert errors["norm 0 of all"] > 1e-3


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


def test_gradients_of_the_head_that_are_put_off_hold_what_they_need() -> None:
    peaks = []
    for limit in (None, 2, 0):
        options = (
            {} if limit is None else {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": limit}
        )
        options = {"gradient_accumulation_fusion": True, **options}
        asked = in_stages(options, precision="bf16", seq_len=512, batch=16)
        asked = asked.model_copy(update={"training": asked.training.model_copy(update={"micro_batches": 16})})
        peaks.append(tracing.trace(asked, rank=1).memory.peak().nbytes)
        with only_plain_traces():
            assert tracing.trace(asked, rank=1).memory.peak().nbytes == peaks[-1]
    none, two, every = peaks
    each = 512 * (96 + 48) * 2  # a micro-batch's gradients of logits and hidden states, in two bytes
    assert two - none > 2 * each
    assert every - two > 13 * each


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
