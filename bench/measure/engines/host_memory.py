"""What ranks hold in the memory of their hosts, and whether a node has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.simulator.costs import node_of
from spbench.bench.measure.trace.memory import PAGEABLE
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measurement import Measurement

_GIB = 2**30


def host_peaks(log: MemoryLog) -> list[int]:
    """The most bytes that a rank has taken of the host by the end of set-up and of each traced step.

    PyTorch's allocator of pinned memory rounds each request up to a power of two, keeps what is freed, and
    gives a block out again only for requests of its own size (allocate and get_free_block of
    ATen/core/CachingHostAllocator.h). So of each size it has as many blocks as were ever alive at once. Of
    pageable memory counts what is alive.
    """
    alive: Counter[int] = Counter()
    most: Counter[int] = Counter()
    pinned = pageable = peak = 0
    taken = []
    for start, end in pairwise([0, log.step_start, *log.step_ends]):
        for event in log.events[start:end]:
            number, change = abs(event) - 1, 1 if event > 0 else -1
            if log.tags.get(number) == PAGEABLE:
                pageable += change * log.sizes[number]
            else:
                size = _rounded(log.sizes[number])
                alive[size] += change
                if alive[size] > most[size]:
                    most[size] = alive[size]
                    pinned += size
            peak = max(peak, pinned + pageable)
        taken.append(peak)
    return taken


def _rounded(nbytes: int) -> int:
    """The least power of two that is not smaller; of nothing, nothing."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def limit_by_host(found: Measurement, cell: Cell, by_rank: Sequence[Measurement]) -> Measurement:
    """A measurement with the largest bytes that a rank and a node hold on hosts; with the status oom where it
    was ok and a node has less.

    Args:
        by_rank: the measurements of ranks, at least one of each class.
    """
    peaks = [m.peak_host_memory_bytes or 0 for m in by_rank]
    if not any(peaks):
        return found
    planned, held = plan(cell), np.zeros(cell.sizes.world, dtype=np.int64)
    for measured, peak in zip(by_rank, peaks, strict=True):
        held[list(planned.class_of(measured.peak_rank).ranks)] = peak
    for measured, peak in zip(by_rank, peaks, strict=True):  # what was measured itself stands
        held[measured.peak_rank] = peak
    cluster = load_cluster(cell.cluster)
    nodes = node_of(np.arange(len(held)), cluster)
    sums = np.bincount(nodes, weights=held).astype(np.int64)
    node = int(sums.argmax())
    found.peak_host_memory_bytes, found.node_host_memory_bytes = int(held.max()), int(sums[node])
    if found.status == "ok" and host_is_full(found, cell):
        total = cluster.host_memory.total_bytes.value or 0
        ranks, fullest = int((nodes == node).sum()), int(held[nodes == node].max())
        found.status = "oom"
        found.reason = (
            f"the host of a node has {total / _GIB:.1f} GiB of memory, and its {ranks} ranks hold "
            f"{sums[node] / _GIB:.1f} GiB there, up to {fullest / _GIB:.2f} GiB each: what waits on the "
            "host does not fit, though the devices have room"
        )
    return found


def part_of_host(cell: Cell, nbytes: int) -> float:
    """The part of a node's host memory that its ranks take if each holds that many bytes there; 0 where the
    cluster does not say how much there is."""
    cluster = load_cluster(cell.cluster)
    ranks = int(np.bincount(node_of(np.arange(cell.sizes.world), cluster)).max())
    total = cluster.host_memory.total_bytes.value
    return nbytes * ranks / total if total else 0.0


def host_is_full(found: Measurement, cell: Cell) -> bool:
    """Whether a node's ranks hold more in its host's memory than that has."""
    total = load_cluster(cell.cluster).host_memory.total_bytes.value
    return total is not None and (found.node_host_memory_bytes or 0) > total
