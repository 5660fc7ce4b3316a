"""Ranks whose tensors go through the host's memory compute what ranks with Gloo do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.verify.cases import verify
from spbench.impls import collectives
from spbench.impls.registries import strategies


def results(mesh: DeviceMesh) -> tuple[str, list[torch.Tensor]]:
    """The result of each collective that strategies and backends use, on views with strides."""
    group, rank = mesh.get_group("sp"), dist.get_rank()
    x = torch.arange(24.0).view(4, 6).t() * (rank + 1)
    gathered, work = collectives.start_all_gather(x, group)
    work.wait()
    parts = [torch.empty(6, 4) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    received = torch.empty(6, 4)
    collectives.exchange([(x.contiguous(), 1 - rank)], [(received, 1 - rank)], group)
    sent = x.contiguous()
    dist.broadcast(sent, 1, group=group)
    return dist.get_backend(), [
        collectives.all_reduce(x.clone(), group),
        collectives.all_to_all(x, 0, 1, group),
        collectives.reduce_scatter(x, 0, group),
        gathered,
        *parts,
        received,
        sent,
    ]


def test_each_collective(pool: RankPool) -> None:
    for (kind, staged), (_, plain) in zip(
        pool.run({"sp": 2}, results, backend=STAGED), pool.run({"sp": 2}, results), strict=True
    ):
        assert kind == STAGED
        assert len(staged) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(staged, plain, strict=True))


class Staged:
    """A pool whose jobs run on the staged backend."""

    def __init__(self, pool: RankPool):
        self.pool, self.size = pool, pool.size

    def run(self, *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(*args, **options | {"backend": STAGED})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["legacy_ddp", "zero1", "zero3"])
def test_strategies_are_right_on_it(pool: RankPool, backend: str) -> None:
    hybrid = "linear-llama3-tiny-hybrid"
    models = ["bert-tiny-linformer", "causal-transformer-tiny", "tnl-tiny", hybrid, "st-dit-tiny"]
    rows = list(verify(None, models, [2], parts=["model"], backend=backend, pool=Staged(pool)))  # type: ignore[arg-type]
    assert [row for row in rows if row.status == "RED"] == []
    green = {row.strategy for row in rows if row.status == "green"}
    assert green >= {*strategies()} - {"single"}
