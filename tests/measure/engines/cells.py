"""Cells of tiny models, cards of a chosen size, and what the meters of one rank see, virtual or real."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import check_sizes
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.meter import Operation
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.layout import Unsupported
from spbench.impls.training.step import initialize

AXES = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def cell_of(strategy: str, n: int, **changes: Any) -> Cell:
    sizes = {AXES[strategy]: n} if strategy in AXES else {}
    defaults = {"model": "bert-tiny", "strategy": strategy, "sizes": sizes, "batch": 3, "seq_len": 24}
    return Cell.model_validate(defaults | changes)


def supported(cell: Cell) -> bool:
    """Whether its strategy can run a cell."""
    try:
        check_sizes(cell)
    except Unsupported:
        return False
    return True


def write_cluster(folder: Path, mib: int) -> str:
    """A cluster of cards with that many usable MiB; returns its path."""
    unknown = "{value: null, source: made up}"
    path = folder / f"card-{mib}.yaml"
    path.write_text(
        f"""
about: for tests
device:
  name: card
  memory_total_bytes: {{value: {(mib + 10) * 2**20}, source: made up}}
  memory_context_bytes: {{value: {10 * 2**20}, source: made up}}
  memory_bandwidth_bytes_per_s: {unknown}
network:
  latency_s: {unknown}
  bandwidth_bytes_per_s: {unknown}
"""
    )
    return str(path)


def approximately(value: Any) -> Any:
    """As the value, but for what sums of many numbers are off by."""
    if isinstance(value, Mapping):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value


#: Gloo's thread lets go of a tensor a moment after a collective has ended, and on a busy machine later than
#: the recorder waits: a real rank's peak can then be too high, by chance. It is never too low, so the lowest
#: of a few attempts is compared, exactly.
ATTEMPTS = 3


@dataclasses.dataclass
class Seen:
    """What the meters of one rank saw."""

    counts: Counter[Operation]
    difference: list[dict[str, Any]]
    peak: int
    setup_peak: int | None
    phase: str
    held: dict[str, int]
    operations: int
    host: int | None


def seen(trace: Trace) -> Seen:
    peak, measured = trace.memory.peak(), trace.measurement(None)
    return Seen(
        trace.communication.counts,
        measured.formula_difference,
        peak.nbytes,
        measured.setup_peak_memory_bytes,
        peak.phase,
        peak.held,
        len(trace.memory.events),
        measured.peak_host_memory_bytes,
    )


def on_a_real_rank(mesh: DeviceMesh, cell: Cell, settle_s: float) -> Seen:
    recorder = Recorder(mesh, settle_s)
    with recorder, no_cyclic_collection():
        record_step(cell, mesh, recorder, torch.Generator().manual_seed(0), partial(initialize, seed=0))
    return seen(Trace.of(cell, dist.get_rank(), recorder))


def on_real_ranks(
    pool: RankPool, sizes: Mapping[str, int], cell: Cell, wanted: Sequence[Seen], attempts: int = ATTEMPTS
) -> list[Seen]:
    """What each real rank saw, with the lowest peak of a few attempts, or less if they see what is wanted."""
    lowest: list[Seen] = []
    for attempt in range(attempts):
        really = pool.run(sizes, on_a_real_rank, cell, 0.001 * 4**attempt)
        lowest = [
            min(low, seen, key=lambda s: s.peak) for low, seen in zip(lowest or really, really, strict=True)
        ]
        if lowest == wanted:
            break
    return lowest


def assert_real_ranks_send_the_same(pool: RankPool, cell: Cell) -> None:
    """As the virtual ones, operation by operation, of every rank, and what the closed forms say."""
    for rank, found in enumerate(pool.run(cell.sizes.by_axis, on_a_real_rank, cell, 0.0)):
        virtually = seen(tracing.trace(cell, rank))
        assert found.counts == virtually.counts
        assert found.difference == virtually.difference == []
        assert found.counts
