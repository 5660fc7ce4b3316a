"""Every data-parallel backend trains as one device does. Where parameters lie in Megatron-Core's buffers, by
hand. What Megatron-Core's stages keep of the hidden states that they received.

Every data-parallel backend sends what its closed form says, and holds less than the one before it.
Every backend sums the gradients of experts over the ranks that have copies of them, and shards them over
these alone."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.tracing import only_plain_traces
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends.backend import Backend
from spbench.impls.backends.buckets import FIRST_BUCKET_BYTES, BucketedGradients
from spbench.impls.backends.buffer_layout import BucketLayout, Sharding, laid_out
from spbench.impls.backends.megatron import Megatron
from spbench.impls.registries import all_backends, model_preset, strategy_class
from spbench.impls.strategies.base import Unsupported
from tests.cells import make_cell
from tests.impls.backends.one_device import (
    LENGTH,
    assert_first_wrong,
    assert_right,
    cell,
    errors_of_rank,
    heavy,
    heavy_run,
)
from tests.measure.engines.real_ranks import assert_real_ranks_are_as_virtual_ones
from tests.measure.verify import backend_faults as faults
from tests.measure.verify.assertions import assert_green
from tests.measure.verify.backend_faults import NormWithoutExperts
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
    for number, backend in enumerate(all_backends()):
        for place, (strategy, sizes, micro_batches) in enumerate(SIZES):
            mesh = "x".join(f"{axis}{n}" for axis, n in sizes.items())
            yield pytest.param(
                cell(backend, strategy, micro_batches, sizes=sizes, mesh=[*sizes]),
                id=f"{backend}-{strategy}-{mesh}-{micro_batches}",
                marks=() if place == number % 2 else pytest.mark.slow,
            )


@pytest.mark.parametrize("asked", [*trained()])
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, asked: Cell) -> None:
    assert_right(pool, asked, all_backends()[asked.training.backend])


PIPELINED = [name for name, cls in all_backends().items() if cls.pipelined]


#: sharded stages have a test of their own
@pytest.mark.parametrize("backend", mostly_slow(PIPELINED, "ddp", "megatron"))
def test_in_pipeline_stages(pool: RankPool, backend: str) -> None:
    assert_right(pool, cell(backend, "single", 2, sizes={"dp": 2, "pp": 2}), all_backends()[backend])


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
    assert_right(pool, asked, all_backends()[backend])
    assert_real_ranks_are_as_virtual_ones(pool, asked.model_copy(update={"precision": "fp16"}))


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
    assert_right(pool, asked, all_backends()[asked.training.backend])
    assert_real_ranks_are_as_virtual_ones(pool, asked.model_copy(update={"precision": "fp16"}))


@pytest.mark.parametrize("backend", [name for name, cls in all_backends().items() if not cls.pipelined])
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


#: of others the default run compares this in test_megatron.py and tests.measure.engines.test_peaks
ALWAYS = ("ddp", "fsdp1", "zero1")


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [({"sp": 2, "dp": 2}, "fp16"), slow({"dp": 2, "sp": 2}, "fp16"), slow({"dp": 3}, "fp32")],
    ids=["sp2xdp2-fp16", "dp2xsp2-fp16", "dp3-fp32"],
)
@pytest.mark.parametrize("backend", mostly_slow(all_backends(), *ALWAYS))
def test_closed_form_virtual_and_real_ranks_send_the_same(
    pool: RankPool, backend: str, sizes: dict[str, int], precision: str
) -> None:
    assert_real_ranks_are_as_virtual_ones(
        pool, cell(backend, "lasp", 2, sizes=sizes, mesh=[*sizes], precision=precision)
    )


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


#: strategy, sizes, micro-batches
MESHES: list[tuple[str, dict[str, int], int]] = [
    ("ulysses", {"dp": 2, "sp": 2, "ep": 2}, 1),  # ep within sp, edp along dp
    ("ulysses", {"sp": 2, "dp": 2, "ep": 2}, 2),  # ep over dp, edp along sp
    ("single", {"dp": 4, "ep": 2, "etp": 2}, 1),  # no copies
    ("megatron_sp", {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, 1),
    ("ring_attention", {"sp": 3, "ep": 3}, 1),
    ("megatron_sp+ring_attention", {"tp": 2, "sp": 2, "ep": 2}, 2),
    ("single", {"dp": 4, "etp": 2}, 1),
]
#: options of backends that cut what they hold otherwise, each on the first of the meshes
OPTIONS: list[dict[str, Any]] = [
    {"backend": "megatron", "distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 2000},
    {"backend": "megatron", "distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
    {"backend": "megatron", "distributed_optimizer": True, "optimizer": "host"},
    {"backend": "zero1", "gradients": "late", "bucket_elements": 5000},
    {"backend": "legacy_ddp", "gradients": "stale"},
    {"backend": "zero3", "optimizer": "host"},
    {"backend": "ddp", "optimizer": "host"},
]


def with_experts(
    training: dict[str, Any], strategy: str, sizes: dict[str, int], n: int, **changed: Any
) -> Cell:
    mesh = [axis for axis in sizes if axis not in ("ep", "etp")]
    training = {**training, "micro_batches": n}
    return cell("", strategy, model="moe-tiny", sizes=sizes, mesh=mesh, training=training, **changed)


def cells(*always: str, **changed: Any) -> Iterator[Any]:
    """Each backend on each mesh, and options on the first; by default some backends on one mesh each. Experts
    are a parameter each on every second mesh and with the options, else one."""
    given = changed.pop("model_options", {})
    for number, name in enumerate(all_backends()):
        for place, (strategy, sizes, n) in enumerate(MESHES):
            options = {**given, "stacked_experts": place % 2 == 0}
            asked = with_experts({"backend": name}, strategy, sizes, n, model_options=options, **changed)
            often = place == number % 3 and name in always
            yield pytest.param(asked, id=f"{name}-{asked.mesh_text}", marks=() if often else pytest.mark.slow)
    for number, training in enumerate(OPTIONS):
        asked = with_experts(training, *MESHES[0], model_options=given, **changed)
        name = "-".join(map(str, training.values()))
        yield pytest.param(asked, id=name, marks=() if number < 1 else pytest.mark.slow)


@pytest.mark.parametrize("asked", [*cells("ddp", "zero3", "fsdp_flat", "megatron")])
def test_gradients_and_updates_of_experts_are_those_of_one_device(pool: RankPool, asked: Cell) -> None:
    assert_right(pool, asked, all_backends()[asked.training.backend])


def test_a_norm_that_leaves_experts_out_is_seen(pool: RankPool) -> None:
    options = {"backend": "megatron", "distributed_optimizer": True}
    asked = with_experts(options, "ulysses", {"dp": 2, "sp": 2, "ep": 2}, 1)
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, NormWithoutExperts):
        assert errors["norm 0 of all"] > 1e-3


@pytest.mark.parametrize(
    "backend", mostly_slow([name for name, cls in all_backends().items() if cls.pipelined], "megatron")
)
def test_experts_in_pipeline_stages(pool: RankPool, backend: str) -> None:
    asked = with_experts({"backend": backend}, "ulysses", {"pp": 2, "sp": 2, "ep": 2}, 2)
    assert_right(pool, asked, all_backends()[backend])


@pytest.mark.parametrize(
    "asked", [*cells("legacy_ddp", "zero3", precision="fp16", model_options={"routing": "even"})]
)
def test_closed_form_virtual_and_real_ranks_send_the_same_with_experts(pool: RankPool, asked: Cell) -> None:
    assert_real_ranks_are_as_virtual_ones(pool, asked)
