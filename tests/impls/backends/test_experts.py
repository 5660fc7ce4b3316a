"""Every backend sums the gradients of experts over the ranks that have copies of them, and shards them over
these alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.registries import backends
from tests.impls.backends.one_device import assert_right, assert_sends_its_closed_form, cell, errors_of_rank
from tests.measure.verify.backend_faults import NormWithoutExperts
from tests.slow import mostly_slow

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
    for number, name in enumerate(backends()):
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
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, asked: Cell) -> None:
    assert_right(pool, asked, backends()[asked.training.backend])


def test_a_norm_that_leaves_experts_out_is_seen(pool: RankPool) -> None:
    options = {"backend": "megatron", "distributed_optimizer": True}
    asked = with_experts(options, "ulysses", {"dp": 2, "sp": 2, "ep": 2}, 1)
    for errors in pool.run(asked.mesh_sizes, errors_of_rank, asked, NormWithoutExperts):
        assert errors["norm 0 of all"] > 1e-3


@pytest.mark.parametrize(
    "backend", mostly_slow([name for name, cls in backends().items() if cls.pipelined], "megatron")
)
def test_in_pipeline_stages(pool: RankPool, backend: str) -> None:
    asked = with_experts({"backend": backend}, "ulysses", {"pp": 2, "sp": 2, "ep": 2}, 2)
    assert_right(pool, asked, backends()[backend])


@pytest.mark.parametrize(
    "asked", [*cells("legacy_ddp", "zero3", precision="fp16", model_options={"routing": "even"})]
)
def test_closed_form_virtual_and_real_ranks_send_the_same(pool: RankPool, asked: Cell) -> None:
    assert_sends_its_closed_form(pool, asked)
