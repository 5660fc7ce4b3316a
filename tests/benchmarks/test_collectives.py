"""Collectives on two Gloo ranks of this machine: part of `pytest tests/benchmarks -m micro`.

The ranks time themselves (:func:`timed_steps.seconds`): a sample is the mean of a burst of calls on the
slower rank, without what it takes to hand a job to them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines.step_times import seconds
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls import collectives

SAMPLES = 10
#: calls of a sample, by the bytes that each is given
BURSTS = {2**16: 10, 2**22: 2}


def ring_shift(x: Tensor, group: dist.ProcessGroup) -> None:
    for _ in collectives.ring(x, group):
        pass


COLLECTIVES: dict[str, Callable[[Tensor, dist.ProcessGroup], Any]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather_flat,
    "reduce_scatter": collectives.reduce_scatter_flat,
    "all_to_all": lambda x, group: collectives.all_to_all(x.view(2, -1), 0, 1, group),
    "ring": ring_shift,
}


class Replayed:
    """A clock that stands still until it is given a duration: what pytest-benchmark reads in place of its own
    for durations that other processes have measured."""

    now_s = 0.0

    def read(self) -> float:
        return self.now_s

    def pass_(self, duration_s: float) -> None:
        self.now_s += duration_s


CLOCK = Replayed()


def seconds_of_ranks() -> float:
    return CLOCK.read()


def timed(mesh: DeviceMesh, name: str, nbytes: int) -> list[float]:
    """Seconds of a call, a sample each of SAMPLES bursts, after one burst to warm up; runs on every rank."""
    torch.set_num_threads(1)
    group, x = mesh.get_group("sp"), torch.ones(nbytes // 4)
    samples = seconds(lambda: COLLECTIVES[name](x, group), "cpu", SAMPLES + 1, burst=BURSTS[nbytes])
    return samples[1:]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.micro
@pytest.mark.benchmark(group="collectives on 2 Gloo ranks", timer=seconds_of_ranks)
@pytest.mark.parametrize("nbytes", BURSTS, ids=["64 KiB", "4 MiB"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective(benchmark: Any, pair: RankPool, name: str, nbytes: int) -> None:
    samples = pair.run({"sp": 2}, timed, name, nbytes, timeout_s=120.0)[0]
    left = iter([*samples, samples[-1]])  # without --benchmark-only there is one call more
    benchmark.pedantic(CLOCK.pass_, setup=lambda: ((next(left),), {}), rounds=len(samples))
    assert min(samples) > 0
