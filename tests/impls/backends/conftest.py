"""Ranks that have run torch's FSDP are ended afterwards."""

from collections.abc import Iterator

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool

#: tests after which ranks are ended; new ones take seconds to start
MOST = 100
_run = [0]


@pytest.fixture(scope="module", autouse=True)
def new_ranks_afterwards(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[None]:
    """Caches of DTensors keep device meshes, and so process groups with a thread each: after some modules
    there are many."""
    yield
    _run[0] += sum(item.path == request.path for item in request.session.items)
    if _run[0] >= MOST:
        pool.close()
        _run[0] = 0
