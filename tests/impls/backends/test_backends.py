"""Every data-parallel backend trains as one device does. Where parameters lie in Megatron-Core's buffers, by
hand. What Megatron-Core's stages keep of the hidden states that they received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import only_plain_traces
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends.backend import Backend
from spbench.impls.backends.buffer_layout import BucketLayout, Sharding, laid_out
from spbench.impls.backends.megatron import Megatron
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backends, strategy_class
from spbench.impls.strategies.base import Unsupported
from tests.impls.backends.one_device import (
    LENGTH,
    assert_first_wrong,
    assert_right,
    assert_sends_its_closed_form,
    cell,
)
from tests.measure.verify import backend_faults as faults
from tests.measure.verify.assertions import assert_green
from tests.slow import mostly_slow, slow

SIZES: list[tuple[str, dict[str, int], int]] = [
    ("lasp", {"sp": 2, "dp": 2}, 2),  # another order of the mesh
    ("single", {"dp": 3}, 2),  # uneven shards
    ("lasp", {"sp": 2, "dp": 2}, 1),
    ("single", {"dp": 3}, 1),
    ("tensor_parallel", {"dp": 2, "tp": 2}, 2),
    ("single", {}, 2),
    ("lasp", {"sp": 2}, 1),
    ("lasp", {"dp": 2, "sp": 2}, 1),
]


def trained() -> Iterator[Any]:
    """Backends and sizes, by default one of the first two."""
    for number, backend in enumerate(backends()):
        for place, (strategy, sizes, micro_batches) in enumerate(SIZES):
            mesh = "x".join(f"{axis}{n}" for axis, n in sizes.items())
            yield pytest.param(
                cell(backend, strategy, micro_batches, sizes=sizes, mesh=[*sizes]),
                id=f"{backend}-{strategy}-{mesh}-{micro_batches}",
                marks=() if place == number % 2 else pytest.mark.slow,
            )


@pytest.mark.parametrize("asked", [*trained()])
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, asked: Cell) -> None:
    assert_right(pool, asked, backends()[asked.training.backend])


PIPELINED = [name for name, cls in backends().items() if cls.pipelined]


#: sharded stages have a test of their own
@pytest.mark.parametrize("backend", mostly_slow(PIPELINED, "ddp", "megatron"))
def test_in_pipeline_stages(pool: RankPool, backend: str) -> None:
    assert_right(pool, cell(backend, "single", 2, sizes={"dp": 2, "pp": 2}), backends()[backend])


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("zero3", {"schedule": "1f1b", "micro_batches": 3}),
        slow("zero2", {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 6}),
        slow("zero2", {"schedule": "1f1b", "micro_batches": 3}),
        slow("zero3", {"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 6}),
        slow("zero3", {"schedule": "gpipe", "micro_batches": 3}),
    ],
)
def test_sharded_stages_gather_and_sum_when_torch_does(
    pool: RankPool, backend: str, schedule: dict[str, Any]
) -> None:
    training = {"backend": backend, **schedule}
    asked = cell(backend, "single", sizes={"dp": 2, "pp": 2}, training=training, model_options={"layers": 4})
    assert_right(pool, asked, backends()[backend])
    assert_sends_its_closed_form(pool, asked.model_copy(update={"precision": "fp16"}))


HYBRID = {"backend": "zero3", "data_parallel_replicate_degree": 2, "micro_batches": 2}


@pytest.mark.parametrize(
    ("strategy", "sizes", "training"),
    [
        ("lasp", {"dp": 2, "sp": 2}, HYBRID),
        slow("single", {"dp": 4}, {**HYBRID, "micro_batches": 3}),
        slow("single", {"dp": 4}, {**HYBRID, "backend": "zero2", "micro_batches": 1}),
        slow("single", {"dp": 4}, {**HYBRID, "wrap": "whole", "micro_batches": 1}),
    ],
)
def test_groups_of_ranks_share_a_copy_each(
    pool: RankPool, strategy: str, sizes: dict[str, int], training: dict[str, Any]
) -> None:
    asked = cell(training["backend"], strategy, sizes=sizes, training=training)
    assert_right(pool, asked, backends()[asked.training.backend])
    assert_sends_its_closed_form(pool, asked.model_copy(update={"precision": "fp16"}))


def test_groups_that_do_not_divide_the_ranks() -> None:
    for groups in (3, 4):
        training = {**HYBRID, "data_parallel_replicate_degree": groups, "micro_batches": 1}
        with pytest.raises(Unsupported, match=f"replicate_degree {groups} does not cut 4 ranks"):
            VirtualEngine().measure(cell("zero3", "single", sizes={"dp": 4}, training=training))


@pytest.mark.parametrize("backend", [name for name, cls in backends().items() if not cls.pipelined])
def test_whole_models_only(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"the backend {backend} .* no pipeline stages; use pp 1"):
        VirtualEngine().measure(cell(backend, "single", 2, sizes={"pp": 2}))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (faults.ReplicasNotSummed, "gradient 0"),
        (faults.WeightsNotGathered, "weight 0"),
        (faults.UpdatesTheNextShard, "weight 0"),
        (faults.FlatGradientNotSummed, "gradient 0"),
        (faults.GradientNotSummed, "gradient 0"),
        (faults.MeanOverRanks, "gradient 0"),
        (faults.WeightsNotGatheredAnew, "gradient 1"),
    ],
)
def test_planted_faults_are_seen(pool: RankPool, fault: type[Backend], where: str) -> None:
    assert_first_wrong(pool, cell(fault.name, sizes={"dp": 2}), fault, where)


@pytest.mark.parametrize("n", mostly_slow((1, 3, 4), 4))
@pytest.mark.parametrize("backend", mostly_slow(sorted({*backends()} - {"legacy_ddp"}), "zero3", "fsdp_flat"))
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
    asked = {
        "model": "gpt3-tiny",
        "model_options": {"layers": 4},
        "strategy": "single",
        "sizes": {"pp": 2},
        "batch": 4,
        "seq_len": 64,
        "precision": "bf16",
        "training": {"backend": "megatron", "micro_batches": 2, **training},
    }
    by_class = VirtualEngine().measure(Cell.model_validate(asked)).by_class
    return {of["rank"]: of["allocated_bytes"] for of in by_class if of["step"] == 1}


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
