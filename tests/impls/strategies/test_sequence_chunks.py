"""What strategies share that cut sequences."""

from __future__ import annotations

import pytest
import torch

from spbench.impls.strategies.sequence_chunks import chunk_of


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_chunk_is_that_of_torch(dim: int, parts: int) -> None:
    x = torch.arange(6 * 12 * 18).view(6, 12, 18)
    for number in range(parts):
        chunk = chunk_of(x, dim, number, parts)
        assert torch.equal(chunk, x.chunk(parts, dim)[number])
        assert chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
