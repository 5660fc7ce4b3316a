"""The clock of real ranks: samples of the slowest rank, the same on all, in seconds of one call."""

import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines import timed_steps
from spbench.bench.measure.engines.timed_steps import seconds
from spbench.bench.measure.processes.rank_pool import RankPool

#: the second far beyond what a busy machine delays a barrier by
_LONG_S, _LATE_S = 0.04, 2.0


def uneven_steps(mesh: DeviceMesh) -> tuple[list[float], list[float]]:
    """Steps of which rank 1's are long, and steps that only communicate, to which rank 1 comes late."""
    rank = dist.get_rank()
    uneven = seconds(lambda: time.sleep(_LONG_S * rank), mesh.device_type, repeats=3)
    time.sleep(_LATE_S * rank)
    return uneven, seconds(dist.barrier, mesh.device_type, repeats=3)


def test_a_step_is_as_long_as_on_the_slowest_rank(pool: RankPool) -> None:
    (first, after_waiting), *others = pool.run({"dp": 2}, uneven_steps)
    assert others == [(first, after_waiting)]
    assert len(first) == 3
    assert min(first) >= _LONG_S
    assert max(after_waiting) < _LATE_S / 2  # none begins before all are there


@pytest.mark.parametrize("burst", [1, 4])
def test_a_sample_is_one_call(burst: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that calls alone move, as a busy machine has other times."""
    calls: list[float] = []
    monkeypatch.setattr(timed_steps.time, "perf_counter", lambda: sum(calls))
    samples = seconds(lambda: calls.append(_LONG_S), "cpu", repeats=2, burst=burst)
    assert len(calls) == 2 * burst
    assert samples == pytest.approx([_LONG_S] * 2)  # not the burst's
