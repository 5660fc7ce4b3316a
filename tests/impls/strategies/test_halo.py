"""The halo of a window, against a mask of all pairs, for random windows and packings."""

from __future__ import annotations

import random

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.ring_attention import RingAttention
from tests.impls.strategies.test_packed_memory import count, packings
from tests.slow import slow


def chunk(rank: int, length: int) -> slice:
    return slice(rank * length, (rank + 1) * length)


@pytest.mark.parametrize("drawn", [60, slow(600)])
def test_no_row_more_or_less_than_the_window_needs(drawn: int) -> None:
    draw = random.Random(0)
    for _ in range(drawn):
        size, length = draw.randint(2, 6), draw.randint(1, 9)
        window = draw.randint(1, size * length - 1)
        mask = seen_pairs(Attended(window=window), size * length)
        last = size - 1  # which has all the others before it
        needed = [
            int(mask[chunk(last, length), chunk(last - d, length)].any(0).sum()) for d in range(1, size)
        ]
        rows = Meetings("contiguous", last, size, length, Attended(window=window)).halo
        assert rows == tuple(n for n in needed if n)
        assert sum(needed) == min(window - 1, (size - 1) * length)


@pytest.mark.parametrize("drawn", [40, slow(400)])
def test_queries_see_in_the_halo_what_a_mask_says(drawn: int) -> None:
    """By chunks, as in a ring, and in one piece, as gathered; what comes from the far end is not seen."""
    for attended, size, length in packings(drawn, 7):
        attended = attended if attended.window else Attended(attended.documents, 1 + len(attended.documents))
        mask = seen_pairs(attended, size * length).int()
        for rank in range(size):
            meetings = Meetings("contiguous", rank, size, length, attended)
            halo = meetings.halo or ()
            mine = mask[chunk(rank, length)]
            together = torch.zeros(length, sum(halo) + length, dtype=torch.int)
            count(together, meetings.of_halo())
            assert together.sum() == mine.sum()
            first = rank * length - sum(halo)
            wrapped, seen = max(0, -first), max(0, first)
            assert torch.equal(together[:, wrapped:], mine[:, seen : (rank + 1) * length])
            for owner in range(size):
                met = torch.zeros(length, length, dtype=torch.int)
                if (found := meetings.of(owner)) is not None:
                    queries, keys, what = found
                    count(met[queries, keys], what)
                    back = rank - owner
                    assert keys.start >= length - [length, *halo][back]
                assert torch.equal(met, mine[:, chunk(owner, length)])


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
@pytest.mark.parametrize(("window", "rows"), [(1, 0), (2, 1), (7, 6), (14, 13), (19, 18), (23, 18)])
def test_as_many_bytes_as_the_window_has(strategy: type[PlacedChunks], window: int, rows: int) -> None:
    """Two bytes an element, gradients four; of 24 positions on 4 ranks there are 18 before the last chunk."""
    model = model_preset("attention-call-tiny", {"window": window})  # 4 heads of keys of 4 features
    sent = {"forward": 0, "backward": 0}
    for t in strategy.planned(4).communication(model.sites(3, 24), 2):
        assert t.collective == "send"
        sent[t.phase] += t.count * t.payload_bytes
    row = 2 * 3 * 4 * 4
    assert sent == {"forward": rows * row * 2, "backward": rows * row * (2 + 4)}


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_a_window_of_the_whole_sequence_is_none(strategy: type[PlacedChunks]) -> None:
    sites = [model_preset("attention-call-tiny", o).sites(3, 24) for o in ({}, {"window": 24})]
    with_window, without = ([*strategy.planned(4).communication(s, 2)] for s in sites)
    assert with_window == without


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_attention", "all_gather_kv"])
@pytest.mark.parametrize("window", [9, 13, 20, 40])
def test_no_rank_holds_more_than_those_that_are_traced(strategy: str, window: int) -> None:
    """A part of a chunk of 12, all of it, two and four; bytes are the closed form's on each rank."""
    asked = Cell.model_validate(
        {
            "model": "causal-transformer-tiny-gqa",
            "model_options": {"window": window, "sinks": True, "vocabulary": 16},
            "strategy": strategy,
            "sizes": {"sp": 5},
            "batch": 2,
            "seq_len": 60,
            "precision": "bf16",
        }
    )
    traces = [tracing.trace(asked, rank) for rank in range(5)]
    planned = plan(asked)
    for rank, trace in enumerate(traces):
        assert not planned.difference(trace.communication, rank)
    peaks = [trace.memory.peak().nbytes for trace in traces]
    assert max(peaks) == max(peaks[each.first] for each in rank_classes(asked))
