"""What all tests share: a pool of ranks, a folder in place of the user's cache, and one thread for torch."""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

from spbench.bench.disk_cache import CACHE_FOLDER, DiskCache
from spbench.bench.engines import trace_cache
from spbench.bench.ranks.rank_pool import RankPool

torch.set_num_threads(1)  # as the ranks have


def pytest_configure(config: pytest.Config) -> None:
    """Keep traces and declarations in a folder that ends with the tests.

    The workers of xdist share it, as they get the environment of the first process.
    """
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="spbench-test-cache-", ignore_cleanup_errors=True)
        os.environ[CACHE_FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put all tests with the pool into one worker of xdist; two workers would start eight ranks."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what is imported by now, which takes it half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or else libraries in C++ complain at the end of what they take for leaks


@pytest.fixture(scope="module")
def kept_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a module's tests trace twice is traced once, as in sweeps; for tests that change no code."""
    with pytest.MonkeyPatch.context() as patched:
        kept = DiskCache(tmp_path_factory.mktemp("traces"), trace_cache.LIMIT_BYTES)
        patched.setattr(trace_cache, "_cache", kept)
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """A pool of four ranks that tests use in turn; its processes start with the first job."""
    with RankPool(4) as ranks:
        yield ranks
