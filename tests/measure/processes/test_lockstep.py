"""Ranks in turns in one process compute what processes with Gloo do, and end where those would hang. Ranks
whose tensors go through the host's memory compute what ranks with Gloo do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.processes.lockstep_ranks import LOCKSTEP, LockstepRanks
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.verify.cases import verify
from spbench.impls import collectives
from spbench.impls.registries import strategies
from spbench.impls.strategies.ring_attention import RingAttention


def test_each_collective_is_that_of_gloo(pool: RankPool) -> None:
    for (kind, ours), (_, gloo) in zip(
        LockstepRanks().run({"sp": 2}, results), pool.run({"sp": 2}, results), strict=True
    ):
        assert kind == LOCKSTEP
        assert len(ours) == len(gloo)
        assert all(torch.equal(a, b) for a, b in zip(ours, gloo, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "model", "part"),
    [
        ("ring_attention", "attention-call-tiny", "model"),
        ("ulysses+ring_attention", "attention-call-tiny", "model"),
        ("lasp", "tnl-tiny", "attention"),
        ("tensor_parallel", "causal-transformer-tiny", "block"),
    ],
)
def test_strategies_are_green(strategy: str, model: str, part: str) -> None:
    rows = list(verify([strategy], [model], [6], parts=[part], pool=LockstepRanks(), batch=1))
    assert {row.status for row in rows} - {"unsupported"} == {"green"}


def test_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingAttention, "communication", lambda *_: iter(()))
    (row, *_) = verify(["ring_attention"], ["attention-call-tiny"], [3], pool=LockstepRanks())
    assert row.status == "RED"
    assert "bytes, 0 by the closed form" in row.verdict


def a_sum_that_rounds(mesh: DeviceMesh) -> float:
    """1 and then 2^-9 on each other rank: in bf16 each addition of those is lost."""
    x = torch.tensor([1.0 if dist.get_rank() == 0 else 2.0**-9], dtype=torch.bfloat16)
    return collectives.all_reduce(x, mesh.get_group("sp")).item()


def test_a_sum_is_rounded_at_each_rank() -> None:
    assert LockstepRanks().run({"sp": 8}, a_sum_that_rounds) == [1.0] * 8


def one_who_waits_in_vain(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)


def one_who_raises(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    collectives.all_reduce(torch.zeros(1), mesh.get_group("sp"))


def test_who_waits_for_what_never_comes_fails_at_once() -> None:
    with pytest.raises(RankError, match="ranks 1 wait for each other"):
        LockstepRanks().run({"sp": 3}, one_who_waits_in_vain)


def test_of_a_failure_and_those_that_wait_for_it_the_failure_is_the_cause() -> None:
    with pytest.raises(RankError, match="ValueError: no more") as raised:
        LockstepRanks().run({"sp": 3}, one_who_raises)
    assert raised.value.rank == 1
    assert not dist.is_initialized()


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
