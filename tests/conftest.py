"""What all tests share: one pool of ranks, and one thread for torch, as the ranks have."""

from collections.abc import Iterator

import pytest
import torch

from spbench.bench.engines.rank_pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that all tests use in turn; they start with the first job."""
    with RankPool(4) as ranks:
        yield ranks
