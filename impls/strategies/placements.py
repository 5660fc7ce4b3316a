"""Where the positions of a sequence lie on ranks whose queries meet the keys of all ranks.

Under a causal mask, where queries see no later key, the placement of positions decides how even work is:
- "contiguous", chunk r of N: rank r has r + 1 blocks to attend to, so the last rank works all the time;
- "striped", positions r, r + N, r + 2N, ...: about half of every block, for every rank (Striped Attention,
  arXiv 2311.09431);
- "zigzag", chunks r and 2N-1-r of 2N: half of every block of others, exactly (The Llama 3 Herd of Models,
  arXiv 2407.21783, section 3.3.2; Megatron-LM's context parallelism).

These balance one long text. Packed documents are even on ranks by one of BALANCED, which know their lengths:
- "zigzag_by_document", chunks r and 2N-1-r of 2N of each document (Transformer Engine's thd layout, which
  pads each document to a multiple of 2N). Here nothing is padded: what is left of all documents, less than 2N
  positions of each, is one sequence, of which each rank has a contiguous part;
- "by_work", chunks of a small size, each to the rank that has the least to attend to so far, the heaviest
  first (as MagiAttention's dispatch, arXiv 2505.13211, section 4.1).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from spbench.impls.attended import Attended, Interval

PLACEMENTS = ("contiguous", "striped", "zigzag")
#: placements by the lengths of documents
BALANCED = ("zigzag_by_document", "by_work")

#: chunks of a rank under "by_work", where they divide its positions
CHUNKS_BY_WORK = 16


@lru_cache(maxsize=32)
def intervals(placement: str, size: int, length: int, attended: Attended) -> tuple[tuple[Interval, ...], ...]:
    """The positions of each of ``size`` ranks, ``length`` each, as runs in the order in which it holds them;
    not of "striped", which has no runs."""
    if placement == "contiguous":
        return tuple(((r * length, (r + 1) * length),) for r in range(size))
    if placement == "zigzag":
        half = length // 2
        places = [(r, 2 * size - 1 - r) for r in range(size)]
        return tuple(tuple((p * half, (p + 1) * half) for p in two) for two in places)
    by_rank = _zigzag_by_document if placement == "zigzag_by_document" else _by_work
    return tuple(tuple(runs) for runs in by_rank(size, length, attended))


def _zigzag_by_document(size: int, length: int, attended: Attended) -> list[list[Interval]]:
    by_rank: list[list[Interval]] = [[] for _ in range(size)]
    left: list[Interval] = []
    for _, _, (start, end) in attended.within_documents([(0, size * length)]):
        part = (end - start) // (2 * size)
        for rank, runs in enumerate(by_rank):
            if part:
                first, second = start + rank * part, start + (2 * size - 1 - rank) * part
                runs += [(first, first + part), (second, second + part)]
        if start + 2 * size * part < end:
            left.append((start + 2 * size * part, end))
    room = sum(end - start for start, end in left) // size
    rank, free = 0, room
    for start, end in left:
        while start < end:
            if not free:
                rank, free = rank + 1, room
            part = min(free, end - start)
            by_rank[rank].append((start, start + part))
            start, free = start + part, free - part
    return [_joined(sorted(runs)) for runs in by_rank]


def _by_work(size: int, length: int, attended: Attended) -> list[list[Interval]]:
    each = math.gcd(length, CHUNKS_BY_WORK)
    part = length // each
    chunks = [(c * part, (c + 1) * part) for c in range(size * each)]
    work = {chunk: attended.pairs([chunk]) for chunk in chunks}
    by_rank: list[list[Interval]] = [[] for _ in range(size)]
    free = [(0, rank) for rank in range(size)]
    for chunk in sorted(chunks, key=lambda chunk: (-work[chunk], chunk)):
        so_far, rank = heapq.heappop(free)
        by_rank[rank].append(chunk)
        if len(by_rank[rank]) < each:
            heapq.heappush(free, (so_far + work[chunk], rank))
    return [_joined(sorted(runs)) for runs in by_rank]


def _joined(runs: Sequence[Interval]) -> list[Interval]:
    """Runs in order, those that follow each other without a gap as one."""
    found: list[Interval] = []
    for start, end in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
