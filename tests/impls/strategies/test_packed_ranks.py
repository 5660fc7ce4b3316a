"""What a rank attends to and holds of packed sequences, against a mask of all pairs, for random packings."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from spbench.bench.measure.engines.unlike_ranks import MOST_SETS, Load, roles_by_load
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.all_gather_kv import AllGatherKV, joint_meetings
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import BALANCED
from spbench.impls.strategies.ring_attention import RingAttention
from tests.slow import slow

PLACEMENTS = ("contiguous", "zigzag", *BALANCED)


def packings(count: int, seed: int) -> Iterator[tuple[Attended, int, int]]:
    """(what is attended, ranks, positions of a rank): documents of one position to all, half of them with a
    window."""
    draw = random.Random(seed)
    for _ in range(count):
        size, length = draw.randint(2, 5), 2 * draw.randint(1, 12)
        documents, left = [], size * length
        while left:
            documents.append(draw.randint(1, draw.choice((3, left, left))) if left > 3 else left)
            left -= documents[-1]
        window = draw.choice((None, draw.randint(1, size * length)))
        yield Attended(tuple(documents), window), size, length


def planned(cls: type[PlacedChunks], size: int, placement: str, attended: Attended) -> list[PlacedChunks]:
    ranks = [cls.planned(size, rank, {"placement": placement}) for rank in range(size)]
    for strategy in ranks:
        strategy.pack(attended)
    return ranks


def count(met: Tensor, seen: Seen) -> None:
    """Add the pairs of a block [queries, keys] that its queries see."""
    if isinstance(seen, bool):
        met.add_(torch.ones_like(met).tril_() if seen else 1)
        return
    for each in seen:
        part = met[each.first_query :, each.first_key :][: each.queries, : each.keys]
        back = torch.arange(each.keys) - torch.arange(each.queries)[:, None]
        part.add_(((back >= each.low) & (back <= each.high)).int())


@pytest.mark.parametrize("packed", [25, slow(200)])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_ranks_attend_to_what_a_mask_says(strategy: type[PlacedChunks], placement: str, packed: int) -> None:
    for attended, size, length in packings(packed, PLACEMENTS.index(placement)):
        mask, ranks = seen_pairs(attended, size * length).int(), planned(strategy, size, placement, attended)
        places = [each.shard(torch.arange(size * length), 0) for each in ranks]
        assert torch.equal(torch.cat(places).sort()[0], torch.arange(size * length))
        for each, mine in zip(ranks, places, strict=True):
            assert len(mine) == length
            meetings = Meetings(placement, each.rank, size, length, attended)
            expected = torch.stack([mask[mine][:, theirs] for theirs in places], 1)  # [queries, ranks, keys]
            met = torch.zeros_like(expected)
            if strategy is RingAttention:
                for owner in range(size):
                    if (found := meetings.of(owner)) is not None:
                        queries, keys, seen = found
                        count(met[queries, owner, keys], seen)
                        # no more rows are computed or held than see something
                        rows = expected[:, owner].any(1).nonzero().flatten()
                        assert (queries.start or 0, queries.indices(length)[1]) == (rows[0], rows[-1] + 1)
                    else:
                        assert not expected[:, owner].any()
            else:
                ((owners, _, _, seen),) = joint_meetings(meetings)
                block = torch.zeros_like(met[:, owners]).flatten(1)
                count(block, seen)
                met[:, owners] = block.unflatten(1, (-1, length))
            assert torch.equal(met, expected)
            assert each.attended_pairs(attended, size * length) == expected.sum()


@pytest.mark.parametrize("placement", BALANCED)
def test_placements_by_documents_are_even(placement: str) -> None:
    """Over the lengths that MagiAttention has, at 128K tokens on 8 ranks."""
    attended = model_preset("causal-transformer-tiny", {"documents": "magi-attention"}).attended(2**17)
    pairs = [each.attended_pairs(attended, 2**17) for each in planned(RingAttention, 8, placement, attended)]
    assert sum(pairs) == int(attended.pairs([(0, 2**17)]).sum())
    assert max(pairs) * 8 < 1.01 * sum(pairs)


def test_sets_of_ranks_have_the_heaviest_first() -> None:
    assert roles_by_load([[3, 0, 1, 2]], [Load(n) for n in (5, 7, 5, 7)]) == [[1, 3], [0, 2]]
    parts = [Load(5, 1, (4,)), Load(5, 2, (2, 2)), Load(5, 2, (2, 2)), Load(5, 2, (3, 1))]
    assert roles_by_load([[0, 1, 2, 3]], parts) == [[3], [1, 2], [0]]
    many = roles_by_load([[*range(1000)]], [Load(n) for n in range(1000)])
    assert len(many) == MOST_SETS
    assert sorted(rank for ranks in many for rank in ranks) == [*range(1000)]
    # the heaviest alone; of all sets the first stands for its mean
    assert many[0] == [999]
    assert sum(ranks[0] * len(ranks) for ranks in many) == sum(range(1000))


def test_stripes_have_no_documents() -> None:
    model = model_preset("causal-transformer-tiny", {"documents": [5, 7]})
    with pytest.raises(Unsupported, match="striped placement; use placement contiguous or zigzag"):
        RingAttention.planned(2, 0, {"placement": "striped"}).check(model.sites(1, 24))
