"""ZeRO-1 whose ranks update whole parameters, as InternEvo's: values, who updates what, and what is sent."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends import zero1
from spbench.impls.backends.flat import owners_of
from spbench.impls.backends.zero1 import ShardedOptimizer, ShardedOptimizerOptions
from tests.impls.backends import one_device

WHOLE = {"backend": "zero1", "shards": "whole"}


def whole(strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    return one_device.cell("zero1", strategy, training={**WHOLE, "micro_batches": micro_batches}, **changed)


def test_gradients_and_updates_are_those_of_one_device(pool: RankPool) -> None:
    one_device.assert_right(pool, whole("tensor_parallel", 2, sizes={"dp": 2, "tp": 2}), ShardedOptimizer)


class KeepsItsUpdates(ShardedOptimizer):
    """The other ranks do not get what a rank has updated."""

    def _broadcast(self, *args: Any) -> None:
        with mock.patch.object(zero1.dist, "broadcast"):
            super()._broadcast(*args)


def test_updates_that_are_kept_are_seen(pool: RankPool) -> None:
    """In the gradients of the next step."""
    of_ranks = pool.run({"dp": 2}, one_device.errors_of_rank, whole(sizes={"dp": 2}), KeepsItsUpdates)
    assert min(max(e for n, e in each.items() if n.startswith("gradient 1")) for each in of_ranks) > 1e-3


def test_closed_form_virtual_and_real_ranks_send_the_same(pool: RankPool) -> None:
    asked = whole(micro_batches=2, sizes={"sp": 2, "dp": 2}, precision="fp16")
    one_device.assert_sends_its_closed_form(pool, asked)


def test_the_largest_go_to_ranks_with_fewest_elements() -> None:
    assert owners_of([1, 9, 4, 4, 3, 1], 3) == [2, 0, 1, 2, 1, 2]
    assert owners_of([5, 5], 4) == [0, 1]


@pytest.mark.parametrize("ranks", [4, 64])
def test_as_many_broadcasts_as_ranks_that_update_something(ranks: int) -> None:
    """The first rank of the class, which is traced, updates most."""
    asked = one_device.cell("zero1", "single", training=WHOLE, batch=ranks, sizes={"dp": ranks})
    (only,) = rank_classes(asked)
    trace = tracing.trace(asked, only.first, events=True)
    assert trace.program is not None
    names = Counter(trace.program.names[n] for n in trace.program.name)
    sizes = [p.numel() for p in asked_parameters(asked)]
    owned = Counter[int]()
    for owner, size in zip(owners_of(sizes, ranks), sizes, strict=True):
        owned[owner] += size
    assert names["broadcast"] == len(owned) == min(ranks, len(sizes))
    assert owned[only.first] == max(owned.values())


def asked_parameters(asked: Cell) -> list[Any]:
    model = one_device.model_preset(asked.model, asked.model_options)
    return [p for p in model.build(one_device.Strategy(), one_device.LENGTH).parameters() if p.requires_grad]


@pytest.mark.parametrize("other", [{"gradients": "late"}, {"optimizer": "host"}])
def test_what_does_not_go_together(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^shards: whole needs gradients: buckets and optimizer: device"):
        ShardedOptimizerOptions(shards="whole", **other)
