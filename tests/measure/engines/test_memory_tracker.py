"""Peaks are those of torch's own MemTracker, to the byte, for every strategy and backend.

MemTracker hooks itself into every module. There is nothing to compare with where that is refused (a module is
called more than once, as in a pipeline or in a second step), and where the hooks keep tensors alive that the
step alone does not (with checkpointing, or where the peak lies in backward: up to 1% of it), nor where some
wait on the host, which it does not tell apart.
"""

from __future__ import annotations

import numpy as np
import pytest

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.trace.memory_log import MemoryLog
from tests.measure.engines.memory_tracker import tracked_peak
from tests.measure.engines.short_cut_cells import SMALL
from tests.slow import mostly_slow

_ITERATED = {"pipeline", "dropout and checkpointing", "two steps", "checkpoints on the host"}
NAMES = SMALL.keys() - _ITERATED - {"fpdt"}


def unrounded_peak(log: MemoryLog) -> int:
    """The largest sum of bytes of live storages, without the granules of an allocator and the workspaces of
    libraries and kernels, which are no tensors."""
    events, sizes = np.asarray(log.events), np.asarray(log.sizes)
    sizes[[number for number, tag in log.tags.items() if tag == "workspaces"]] = 0
    return int(np.cumsum(np.sign(events) * sizes[np.abs(events) - 1]).max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", mostly_slow(sorted(NAMES), "ring_self_attention", "lasp", "lasp under zero3", "ulysses")
)
def test_the_peak_is_that_of_torchs_own_tracker(name: str) -> None:
    assert unrounded_peak(tracing.trace(SMALL[name]).memory) == tracked_peak(SMALL[name])


def test_a_storage_that_is_missed_is_seen() -> None:
    log = tracing.trace(SMALL["ring_self_attention"]).memory
    assert log.tags
    log.sizes[next(iter(log.tags))] -= 4
    assert unrounded_peak(log) == tracked_peak(SMALL["ring_self_attention"]) - 4
