"""Layouts that are simpler than the one that would be named and were not traced, though they may tie with
the fastest: the search itself looks for what is faster alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from spbench.bench.advise.candidates import Candidate
from spbench.bench.advise.findings import Seen
from spbench.bench.advise.learned import Learned
from spbench.bench.advise.ranking import complexity, ranked, shape_complexity, tie_limit
from spbench.bench.advise.waiting import Waiting


def simpler(
    waiting: Waiting, learned: Learned, best: Sequence[Seen], most_bytes: float
) -> Iterator[tuple[int, Candidate]]:
    """The candidates, with their places, that have fewer strategies, axes or runs of layers than the layout
    that would be named, and by what was learned tie with the fastest and fit: of each strategy and mesh one,
    the fastest first.

    Args:
        best: of each strategy and mesh one that was traced, the fastest first.
        most_bytes: a layout that takes more is not traced.
    """
    named = complexity(ranked(best)[0].cell)
    kinds = {(seen.cell.strategy, seen.cell.mesh_text) for seen in best}
    expected_s = learned.expected_s(waiting)
    places = np.flatnonzero(waiting.left & (expected_s <= best[0].step_s * tie_limit(best)))
    for at in places[np.argsort(expected_s[places], kind="stable")].tolist():
        candidate = waiting.candidates[at]
        layout = candidate.layout
        shape = shape_complexity(candidate.strategy, layout.sizes, layout.virtual_stages)
        if shape >= named[: len(shape)] or candidate.kind in kinds:
            continue
        if learned.least_bytes(candidate) <= most_bytes:
            kinds.add(candidate.kind)
            yield at, candidate
