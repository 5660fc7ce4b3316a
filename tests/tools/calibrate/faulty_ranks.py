"""What ranks do with planted faults while rates are measured: a module that they import fast."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.tools.calibrate import collective_rates, compute_rates
from spbench.bench.tools.calibrate.compute_rates import RatePoint, RateSweep

TINY = RateSweep(
    sides=(4, 8), lengths=(8,), summed_bytes=(64,), message_bytes=(3, 64, 4096), samples=2, sample_s=0.0
)


def faulty_sums(mesh: Any, sweep: RateSweep) -> list[Any]:
    """The points of collectives where all_reduce forgets a rank's part of the last element."""
    right = collective_rates.all_reduce

    def forgetful(x: torch.Tensor, group: Any) -> torch.Tensor:
        right(x, group)
        x[-1] -= 1
        return x

    collective_rates.all_reduce = forgetful  # type: ignore[assignment]
    try:
        return list(collective_rates.collective_rates("cpu", sweep))
    finally:
        collective_rates.all_reduce = right


def short_of_memory(mesh: DeviceMesh) -> list[int]:
    """The extents of a series of which rank 1 has no memory for the third."""

    def make(extent: int) -> Callable[[], Any]:
        if extent == 3 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("planted")
        return lambda: None

    trials = (
        (RatePoint("sum", "", extent, "fp32", 2, flops=1), partial(make, extent)) for extent in range(1, 6)
    )
    return [point.extent for point in compute_rates._series(trials, mesh.device_type, TINY)]
