"""The candidates of a search that were not traced, as arrays: of many GPUs there are a million."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spbench.bench.tools.advise.candidates import Candidate, Variant
from spbench.bench.tools.advise.layouts import Way


class Waiting:
    """Candidates that wait for a trace.

    Attributes:
        candidates: all, also those that were taken.
        estimated_s: of each.
        ways, variants: that they have.
        alike: the candidates of one way with the same variants are alike; of each such group the place of its
            way, and those of its variants.
        alike_at: of each candidate, the place of its group.
        left: whether each still waits.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.estimated_s = np.array([each.estimated_s for each in candidates], dtype=float)
        ways: dict[Way, int] = {}
        variants: dict[Variant, int] = {}
        alike: dict[tuple[int, ...], int] = {}
        places = [
            (
                ways.setdefault(each.layout.way, len(ways)),
                *(variants.setdefault(variant, len(variants)) for variant in each.variants),
            )
            for each in candidates
        ]
        self.alike_at = np.array([alike.setdefault(each, len(alike)) for each in places], dtype=int)
        self.alike = np.array([*alike], dtype=int).reshape(len(alike), -1)
        self.ways, self.variants = [*ways], [*variants]
        self.left = np.ones(len(candidates), dtype=bool)

    def __len__(self) -> int:
        return int(self.left.sum())

    def take(self, places: Iterable[int]) -> None:
        """Leave out the candidates at these places."""
        self.left[[*places]] = False
