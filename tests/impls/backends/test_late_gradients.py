"""ZeRO-1 whose gradients are summed after backward, as DeepSpeed's: values, bytes, and what is held."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends import zero1
from spbench.impls.backends.zero1 import LateGradients, ShardedOptimizer, Take
from tests.impls.backends import one_device
from tests.slow import slow

#: smaller than some gradients, and than most two of them
SMALL = {"backend": "zero1", "gradients": "late", "bucket_elements": 3000}


def late(strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    training = {**SMALL, "micro_batches": micro_batches, **changed.pop("training", {})}
    return one_device.cell("zero1", strategy, training=training, **changed)


@pytest.mark.parametrize("on", ["device", slow("host")])
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, on: str) -> None:
    asked = late("tensor_parallel", 2, sizes={"dp": 2, "tp": 2}, training={"optimizer": on})
    one_device.assert_right(pool, asked, ShardedOptimizer)


class NotSummed(ShardedOptimizer):
    """A rank's part is that of its own gradient."""

    def synchronize(self) -> None:
        with mock.patch.object(zero1, "all_reduce", lambda x, group: x):
            super().synchronize()


class PartsTakenTooLate(ShardedOptimizer):
    """The buffer has been filled again before a rank's part is taken out of it."""

    def synchronize(self) -> None:
        given: list[tuple[nn.Parameter, Tensor]] = []
        real = LateGradients.finish

        def finish(late: LateGradients, take: Take) -> None:
            real(late, lambda p, gradient: given.append((p, gradient)))
            for p, gradient in given:
                take(p, gradient)

        with mock.patch.object(LateGradients, "finish", finish):
            super().synchronize()


@pytest.mark.parametrize("fault", [NotSummed, PartsTakenTooLate])
def test_planted_faults_are_seen(pool: RankPool, fault: type[ShardedOptimizer]) -> None:
    """By a rank whose part is not all in the last buffer."""
    asked = late(sizes={"dp": 2})
    of_ranks = pool.run(asked.mesh_sizes, one_device.errors_of_rank, asked, fault)
    assert max(e for errors in of_ranks for n, e in errors.items() if n.startswith("gradient 0")) > 1e-3


def test_closed_form_virtual_and_real_ranks_send_the_same(pool: RankPool) -> None:
    one_device.assert_sends_its_closed_form(
        pool, late(micro_batches=2, sizes={"sp": 2, "dp": 2}, precision="fp16")
    )


def test_a_rank_holds_no_gradient_in_forward() -> None:
    """Between steps float32 weights and moments of a shard, no buckets and no float32 gradient; after
    backward half gradients, beside the buffer, which a large one makes the peak."""
    asked = one_device.heavy("zero1", 8)
    settings = asked.training.model_dump() | SMALL
    elements, peaks = model_parameters(asked), {}
    for n in (3000, 2 * elements):
        training = settings | {"bucket_elements": n}
        found = VirtualEngine().measure(Cell.model_validate(asked.model_dump() | {"training": training}))
        assert found.peak_held["optimizer_state"] == pytest.approx((4 + 8) / 8 * elements, rel=0.02)
        assert found.peak_held["gradients"] == 0
        peaks[n] = found.peak_memory_bytes or 0
    small, large = peaks.values()
    assert large - small == pytest.approx(2 * 2 * elements, rel=0.02)
    assert small < (one_device.heavy_run("zero1", 8).peak_memory_bytes or 0) - 2 * elements


def test_a_buffer_has_elements() -> None:
    with pytest.raises(ValueError, match="bucket_elements is at least 1, not 0"):
        VirtualEngine().measure(late(training={"bucket_elements": 0}))
