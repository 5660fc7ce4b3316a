"""What all tests share: a pool of ranks, a cache of traces of their own, and one thread for torch."""

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from spbench.bench.engines.rank_pool import RankPool
from spbench.bench.engines.trace_cache import TRACE_CACHE

torch.set_num_threads(1)  # as the ranks have


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of sweeps keep their traces in a folder that ends with the tests, which the workers of
    xdist share: they get the environment of the first process."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="spbench-test-traces-", ignore_cleanup_errors=True)
        os.environ[TRACE_CACHE] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put all tests with the pool into one worker of xdist; two workers would start eight ranks."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """A pool of four ranks that tests use in turn; its processes start with the first job."""
    with RankPool(4) as ranks:
        yield ranks
