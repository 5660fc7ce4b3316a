"""Planted faults in every data-parallel backend; each stage of ZeRO holds less than the one before it. Where
parameters lie in Megatron-Core's buffers, by hand. What Megatron-Core's stages keep of the hidden states that
they received."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.tracing import only_plain_traces
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends.buckets import FIRST_BUCKET_BYTES, BucketedGradients
from spbench.impls.backends.buffer_layout import BucketLayout, Sharding, laid_out
from spbench.impls.backends.megatron import Megatron
from spbench.impls.registries import all_backends, model_preset, strategy_class
from spbench.impls.strategies.base import Unsupported
from tests.cells import make_cell
from tests.impls.backends.one_device import (
    LENGTH,
    cell,
    errors_of_rank,
    heavy,
    heavy_run,
    trained,
)
from tests.measure.verify.assertions import assert_green
from tests.measure.verify.backend_faults import NormWithoutExperts
from tests.slow import mostly_slow


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
    "megatron": lambda n: (2, 4 + 8),
    "fsdp_flat": lambda n: (0, (4 + 8) / n),
    "fsdp1": lambda n: (0, (4 + 8) / n),
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
