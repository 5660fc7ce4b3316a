"""The candidates of a search that were not traced, as arrays: of many GPUs there are a million."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spbench.bench.advise.candidates import Candidate, Variant
from spbench.bench.advise.layouts import Way


class Waiting:
    """Candidates that wait for a trace.

    Attributes:
        candidates: all, also those that were taken.
        estimated_s: of each.
        ways, variants: that they have.
        way_at, variants_at: of each candidate, the place of its way, and those of its variants.
        left: whether each still waits.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.estimated_s = np.array([each.estimated_s for each in candidates], dtype=float)
        ways: dict[Way, int] = {}
        variants: dict[Variant, int] = {}
        self.way_at = np.array(
            [ways.setdefault(each.layout.way, len(ways)) for each in candidates], dtype=int
        )
        places = [[variants.setdefault(v, len(variants)) for v in each.variants] for each in candidates]
        self.variants_at = np.array(places, dtype=int).reshape(len(candidates), -1)
        self.ways, self.variants = [*ways], [*variants]
        self.left = np.ones(len(candidates), dtype=bool)

    def __len__(self) -> int:
        return int(self.left.sum())

    def take(self, places: Iterable[int]) -> None:
        """Leave out the candidates at these places."""
        self.left[[*places]] = False
