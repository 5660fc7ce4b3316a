"""What all tests share: a pool of ranks, a single thread for torch, as the ranks have, and a folder in place
of the one in which the user's commands keep things."""

from collections.abc import Iterator

import pytest
import torch

from spbench.bench.declarations import CACHE_FOLDER
from spbench.bench.engines.rank_pool import RankPool

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put all tests with the pool into one worker of xdist; two workers would start eight ranks."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_FOLDER, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """A pool of four ranks that tests use in turn; its processes start with the first job."""
    with RankPool(4) as ranks:
        yield ranks
