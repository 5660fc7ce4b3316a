"""Ranks that have run torch's FSDP are ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool


@pytest.fixture(scope="module", autouse=True)
def new_ranks_afterwards(pool: RankPool) -> Iterator[None]:
    """Caches of DTensors keep device meshes, and so process groups with a thread each."""
    yield
    pool.close()
