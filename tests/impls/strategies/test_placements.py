"""Placements of positions on ranks, of each strategy that has them."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from spbench.impls.registries import strategies
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.meetings import Meetings, meeting
from spbench.impls.strategies.placed_chunks import PlacedChunks, PlacementOptions
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.sequence_chunks import chunk_of
from tests.measure.verify.attention_model import AttentionModel

PLACED: list[type[PlacedChunks]] = [RingAttention, AllGatherKV]
GRID = AttentionModel("full_attention")
LINEAR = AttentionModel("linear_attention")
SIZES = [*((p, 4) for p in PLACEMENTS), ("striped", 1)]


def positions(placement: str, n: int, length: int) -> list[Tensor]:
    """Those of each of n ranks."""
    ranks = [RingAttention.planned(n, r, {"placement": placement}) for r in range(n)]
    return [strategy.shard(torch.arange(n * length), 0) for strategy in ranks]


def assert_covered(met: Tensor, mine: Tensor, theirs: Iterable[Tensor]) -> None:
    """Every query has met the keys that are not later once, and no other."""
    keys = torch.cat([*theirs])
    assert torch.equal(met, (mine.unsqueeze(-1) >= keys).int())


def count(met: Tensor, causal: bool) -> None:
    met.add_(torch.ones_like(met).tril() if causal else 1)


@pytest.mark.parametrize(("placement", "length"), SIZES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_blocks_cover_what_causality_allows(n: int, placement: str, length: int) -> None:
    places = positions(placement, n, length)
    for rank in range(n):
        for owner in range(n):
            met = torch.zeros(length, length, dtype=torch.int)
            if (found := meeting(placement, rank, owner, length)) is not None:
                mine, theirs, causal = found
                count(met[mine, theirs], causal)
            assert_covered(met, places[rank], [places[owner]])


@pytest.mark.parametrize(("placement", "length"), SIZES)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_joint_blocks_cover_what_causality_allows(n: int, placement: str, length: int) -> None:
    places, calls = positions(placement, n, length), set()
    for rank in range(n):
        found = [*joint_meetings(Meetings(placement, rank, n, length))]
        met = torch.zeros(length, n, length, dtype=torch.int)
        for owners, mine, theirs, causal in found:
            block = met[mine, owners, theirs]
            if causal:
                assert block.shape[1] == 1
                count(block[:, 0], causal)
            else:
                count(block, causal)
        assert_covered(met.flatten(1), places[rank], places)
        assert found[0][1] == slice(None)  # all queries
        calls.add(len(found))
    assert max(calls) <= {"contiguous": 2, "zigzag": 3, "striped": n}[placement]


@pytest.mark.parametrize(
    ("strategy", "model", "placement", "message"),
    [
        *(
            (s, AttentionModel(), "zigzag", "36 is not divisible by twice 4 ranks; use .* 32 or 40")
            for s in PLACED
        ),
        *(
            (s, AttentionModel("full_attention"), "striped", "a grid has no striped placement; use")
            for s in PLACED
        ),
        (RingAttention, LINEAR, "striped", "linear attention has no striped placement; use"),
        (
            AllGatherKV,
            LINEAR,
            "striped",
            "all_gather_kv has no linear attention; use lasp, lasp2, ring_attention, ulysses, or",
        ),
    ],
)
def test_what_cannot_be(
    strategy: type[PlacedChunks], model: AttentionModel, placement: str, message: str
) -> None:
    strategies()  # as where one is looked up: all are there to be named
    with pytest.raises(Unsupported, match=message):
        strategy.planned(4, options={"placement": placement}).check(model.sites(1, 36))


def test_unknown_placement() -> None:
    with pytest.raises(ValueError, match="one of contiguous, striped, zigzag, not 'spiral'"):
        PlacementOptions(placement="spiral")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_chunk_is_that_of_torch(dim: int) -> None:
    x = torch.arange(6 * 12 * 18).view(6, 12, 18)
    for parts in (1, 2, 3):
        for number, expected in enumerate(x.chunk(parts, dim)):
            chunk = chunk_of(x, dim, number, parts)
            assert torch.equal(chunk, expected)
            assert chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
