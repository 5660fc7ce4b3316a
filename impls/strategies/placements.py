"""Placements of a sequence's positions on ranks whose queries meet the keys of all ranks.

Under a causal mask, where queries see no later key, the placement decides how even the work is:
- "contiguous", chunk r of N: rank r has r + 1 blocks to attend to, so the last rank works all the time;
- "striped", positions r, r + N, r + 2N, ...: every rank attends to about half of every block (Striped
  Attention, arXiv 2311.09431);
- "zigzag", chunks r and 2N-1-r of 2N: every rank attends to exactly half of every other rank's block (The
  Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2; Megatron-LM's context parallelism).

These placements balance one long text. For packed documents those of BALANCED, which use the documents'
lengths, give even work:
- "zigzag_by_document", chunks r and 2N-1-r of 2N of each document (Transformer Engine's thd layout, which
  pads each document to a multiple of 2N). Here nothing is padded: the remainders, less than 2N positions of
  each document, form one sequence, of which each rank has a contiguous part;
- "by_work", small chunks, the heaviest first, each to the rank with the fewest pairs of queries and keys so
  far (as in MagiAttention's dispatch, arXiv 2505.13211, section 4.1).
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from spbench.impls.attended import Attended, Numbers

PLACEMENTS = ("contiguous", "striped", "zigzag")
#: placements by the lengths of documents
BALANCED = ("zigzag_by_document", "by_work")

#: the number of chunks of a rank under "by_work"; fewer if this number does not divide the rank's positions
CHUNKS_BY_WORK = 16


@lru_cache(maxsize=32)
def intervals(placement: str, size: int, length: int, attended: Attended) -> Sequence[Numbers]:
    """The positions of each of ``size`` ranks, ``length`` each, as runs [n, 2] in the order in which a rank
    holds them. "striped" has no runs."""
    if placement == "contiguous":
        return [np.array([[r * length, (r + 1) * length]]) for r in range(size)]
    if placement == "zigzag":
        half = length // 2
        places = np.array([(r, 2 * size - 1 - r) for r in range(size)])
        return [*np.stack((places * half, (places + 1) * half), 2)]
    return (_zigzag_by_document if placement == "zigzag_by_document" else _by_work)(size, length, attended)


def _zigzag_by_document(size: int, length: int, attended: Attended) -> list[Numbers]:
    _, _, starts, ends = attended.within_documents([(0, size * length)]).T
    parts = (ends - starts) // (2 * size)
    left = np.stack((starts + 2 * size * parts, ends), 1)
    whole, parts = starts[parts > 0], parts[parts > 0]
    by_rank = []
    for rank, rest in enumerate(_shared_out(left[left[:, 0] < left[:, 1]], size)):
        firsts = np.concatenate([whole + place * parts for place in (rank, 2 * size - 1 - rank)])
        runs = np.stack((firsts, firsts + np.tile(parts, 2)), 1)
        by_rank.append(_joined(np.concatenate((runs, rest))))
    return by_rank


def _shared_out(runs: Numbers, size: int) -> Iterator[Numbers]:
    """Yields each rank's part [n, 2] of the runs: contiguous, and of equally many positions for each rank."""
    ends = np.cumsum(runs[:, 1] - runs[:, 0])
    total = int(ends[-1]) if len(ends) else 0
    for rank in range(size):
        # how much of each run lies before a rank's part, and before the next one's
        before, after = (
            np.clip(place - np.append(0, ends[:-1]), 0, runs[:, 1] - runs[:, 0])
            for place in (rank * total // size, (rank + 1) * total // size)
        )
        part = np.stack((runs[:, 0] + before, runs[:, 0] + after), 1)
        yield part[before < after]


def _by_work(size: int, length: int, attended: Attended) -> list[Numbers]:
    each = math.gcd(length, CHUNKS_BY_WORK)
    starts = np.arange(size * each) * (length // each)
    chunks = np.stack((starts, starts + length // each), 1)
    work = attended.pairs(chunks)
    by_rank: list[list[int]] = [[] for _ in range(size)]
    free = [(0, rank) for rank in range(size)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        so_far, rank = heapq.heappop(free)
        by_rank[rank].append(chunk)
        if len(by_rank[rank]) < each:
            heapq.heappush(free, (so_far + int(work[chunk]), rank))
    return [_joined(chunks[held]) for held in by_rank]


def _joined(runs: Numbers) -> Numbers:
    """The runs [n, 2] sorted by position; runs that follow each other without a gap become one."""
    starts, ends = runs[np.argsort(runs[:, 0])].T
    gap = starts[1:] != ends[:-1]
    return np.stack((starts[np.append(True, gap)], ends[np.append(gap, True)]), 1)
