"""What traces have taught about the estimates of candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spbench.bench.tools.choose.candidates import SURELY, Candidate, Variant
from spbench.bench.tools.choose.layouts import Way
from spbench.impls import PLUS

#: standard deviations, of logarithms: of what was traced from its factors, and of the factor of a way, and of
#: a backend or a size of micro-batches, before anything was traced
_NOISE, _SD_OF_WAY, _SD = 0.03, 1.0, 0.1
#: seconds may be off by this much more for each doubling of ranks along an axis from what was traced
_MARGIN_OF_STEP = 1.08
#: until a layout of a strategy was traced, its estimated seconds may be too high, or too low, by so much; and
#: by so much beside those of its slowest part, where one was traced alone or in several others
UNKNOWN, _OF_PARTS = 1.35, 1.1
#: until one was traced, estimated bytes may be too many by so much
_MARGIN_OF_UNKNOWN = 1.25
#: an excess of bytes is no more than so many times as large where there are more activations
_MOST_SHARE = 2.0
#: by so much, in logarithms, is a strategy that was not traced looked at before others as fast
_BENEFIT = 0.1


class Waiting:
    """Candidates that wait for a trace, as arrays: of many GPUs there are a million.

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
        #: of each group, the samples of a micro-batch
        self.micro_batches = np.ones(len(alike))
        self.micro_batches[self.alike_at] = [each.layout.micro_batch for each in candidates]
        self.left = np.ones(len(candidates), dtype=bool)

    def __len__(self) -> int:
        return int(self.left.sum())

    def simpler(
        self,
        than: tuple[int, ...],
        expected_s: np.ndarray,
        most_s: float,
        known: Callable[[str], bool],
        may_fit: Callable[[Candidate], bool],
    ) -> Iterator[int]:
        """The places of candidates with less complexity (or as much, if their strategy was not traced) that
        probably take no longer and may fit, the simplest first; one for each strategy and mesh."""
        every, near = self.candidates, np.flatnonzero(self.left & (expected_s <= most_s)).tolist()
        places, kinds = [at for at in near if every[at].complexity <= than], set()
        for at in sorted(places, key=lambda at: (every[at].complexity, expected_s[at])):
            each = every[at]
            new = each.kind not in kinds and (each.complexity < than or not known(each.strategy))
            if new and may_fit(each):
                kinds.add(each.kind)
                yield at

    def take(self, places: Iterable[int]) -> None:
        """Take out the candidates at these places: they wait no longer."""
        self.left[[*places]] = False

    def leave_out(self, of_strategy: Callable[[str], bool]) -> int:
        """Leave out the candidates of these strategies; returns how many of them were still waiting."""
        of_ways = np.array([of_strategy(way.strategy) for way in self.ways], dtype=bool)
        gone = self.left & of_ways[self.alike[:, 0]][self.alike_at]
        self.left &= ~gone
        return int(gone.sum())


class Excess(NamedTuple):
    """How many bytes more a traced candidate took than was estimated: what is the same whatever a rank
    computes, a share of all, buffers of its part of the samples, activations, or those of them that each rank
    along an axis has whole."""

    more: float
    of: Candidate

    def least(self, candidate: Candidate) -> float:
        """The least bytes of a similar candidate, whatever kind of bytes the excess is."""
        shares = (min(share, _MOST_SHARE) for share in self._shares(candidate))
        return candidate.estimated_bytes + min(self.more * share for share in shares)

    def most(self, candidate: Candidate) -> float:
        """The most bytes of a similar candidate, whatever kind of bytes the excess is."""
        return candidate.estimated_bytes + max(self.more * share for share in self._shares(candidate))

    def _shares(self, candidate: Candidate) -> tuple[float, ...]:
        """By kind of bytes, how many times as large the excess of another candidate is as the traced one's,
        if the excess is of that kind."""
        here, there = candidate.layout, self.of.layout
        ranks = here.way.ranks / there.way.ranks
        activations = max(1.0, candidate.activation_bytes) / max(1.0, self.of.activation_bytes)
        of_axes = ((1 - 1 / n) / (1 - 1 / there.way.axes[axis]) for axis, n in here.way.axes.items())
        return (
            1.0,
            candidate.estimated_bytes / self.of.estimated_bytes,
            here.micro_batch / there.micro_batch / ranks,
            activations,
            activations * ranks * math.prod(of_axes),
        )


class Bounds(NamedTuple):
    """Seconds that candidates probably take, and that they take at the least, each [candidates]."""

    expected_s: np.ndarray
    least_s: np.ndarray


class Learned:
    """Corrections to the estimates, from traced candidates.

    Seconds: one factor per way, per backend and per size of micro-batches, fitted to traced over estimated
    seconds by Bayesian least squares of their logarithms. A size that was traced only with ways that were
    traced with no other size is as good as unknown: its factor cannot be separated from theirs. Bytes: the
    traced excess over the estimate of the candidates that are most alike.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Candidate, float]] = []
        #: of each way that was traced, the largest micro-batch; and the ways by the parts of their strategies
        self._largest: dict[Way | None, int] = {}
        self._parts: dict[str, list[Way]] = {}
        self._excess: dict[Hashable, list[Excess]] = {}
        self.fit()

    def knows(self, strategy: str) -> bool:
        """Whether a layout of a strategy was traced."""
        return strategy in self._excess

    def unsettled_parts(self, strategy: str) -> set[str]:
        """The parts of a strategy that were traced neither alone nor in several others, so that nothing says
        how much of a step is theirs."""
        return {part for part in strategy.split(PLUS) if not self._ways_of_part(part)}

    def _ways_of_part(self, part: str) -> Sequence[Way]:
        """The traced ways that say how long a part takes."""
        ways = self._parts.get(part, ())
        strategies = {way.strategy for way in ways}
        return ways if part in strategies or len(strategies) > 1 else ()

    def knows_parts(self, strategy: str) -> bool:
        """Whether a layout with each part of a strategy was traced."""
        return all(part in self._parts for part in strategy.split(PLUS))

    def add(self, candidate: Candidate, seconds: float, nbytes: float) -> None:
        """Take in the seconds and bytes that a trace of the candidate at a place has."""
        self._seen.append((candidate, math.log(seconds / candidate.estimated_s)))
        excess = Excess(nbytes - candidate.estimated_bytes, candidate)
        for _, key in _likenesses(candidate):
            self._excess.setdefault(key, []).append(excess)
        layout = candidate.layout
        if layout.way not in self._largest:
            for part in candidate.strategy.split(PLUS):
                self._parts.setdefault(part, []).append(layout.way)
        self._largest[layout.way] = max(layout.micro_batch, self._largest.get(layout.way, 0))

    def fit(self) -> None:
        """Work out the logarithms of the factors, and their covariance."""
        variants = list(dict.fromkeys(each for c, _ in self._seen for each in c.variants))
        columns: dict[Hashable, int] = {name: at for at, name in enumerate([*self._largest, *variants])}
        matrix = np.zeros((len(self._seen), len(columns)))
        for row, (candidate, _) in enumerate(self._seen):
            matrix[row, [columns[name] for name in (candidate.layout.way, *candidate.variants)]] = 1.0
        off = np.array([each for _, each in self._seen])
        before = np.array([_SD_OF_WAY] * len(self._largest) + [_SD] * len(variants))
        self._columns = columns
        self._covariance = np.linalg.inv(matrix.T @ matrix / _NOISE**2 + np.diag(before**-2.0))
        # the last is of a way or a variant that was not traced
        self._factors = np.append(self._covariance @ matrix.T @ off / _NOISE**2, 0.0)

    def bounds(self, waiting: Waiting) -> Bounds:
        """The seconds that candidates take; each way is taken for the traced one of its strategy that is
        fewest doublings of ranks away. If micro-batches are larger than the traced candidate's, the excess of
        its step over the estimate may come with each micro-batch, as where the host is slower than the
        card."""
        unknown, strategies = len(self._columns), [way.strategy for way in waiting.ways]
        relatives = {each: self._relatives(each) for each in dict.fromkeys(strategies)}
        nearest = [self._nearest(way) for way in waiting.ways]
        way_at, *variants_at = waiting.alike.T
        ways = np.array([self._columns.get(each, unknown) for each in nearest], dtype=int)[way_at]
        variants = np.array([self._columns.get(each, unknown) for each in waiting.variants], dtype=int)
        columns = [ways, *(variants[at] for at in variants_at)]
        off = np.array([relatives[each] for each in strategies], dtype=float)[way_at]
        off = np.where(ways < unknown, self._factors[ways], off)
        off = off + sum(self._factors[each] for each in columns[1:])
        largest = np.array([self._largest.get(each, math.inf) for each in nearest], dtype=float)[way_at]
        fewer = np.minimum(1.0, largest / waiting.micro_batches)
        at_least = np.where(off > 0, np.log1p(np.expm1(off) * fewer), off)
        both = zip(waiting.ways, nearest, strict=True)
        doublings = np.array([_doublings(*each) for each in both], dtype=float)[way_at]
        margins = self._deviations(columns) + doublings * math.log(_MARGIN_OF_STEP)
        parts = np.array([self._slowest_part(each) for each in strategies], dtype=float)[way_at]
        of_parts = np.maximum(parts - math.log(_OF_PARTS), -math.log(UNKNOWN))
        least = np.where(ways < unknown, at_least - margins, of_parts)
        return Bounds(*(waiting.estimated_s * np.exp(each)[waiting.alike_at] for each in (off, least)))

    def _deviations(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Standard deviations of sums of factors; an unknown factor has its variance of before any trace, and
        depends on no other factor."""
        own = np.append(np.diag(self._covariance), _SD**2)
        others = np.pad(self._covariance - np.diag(np.diag(self._covariance)), (0, 1))
        crossed = sum(others[a, b] for a, b in itertools.combinations(columns, 2))
        deviations: np.ndarray = np.sqrt(sum(own[at] for at in columns) + 2 * crossed)
        return deviations

    def _nearest(self, way: Way) -> Way | None:
        """The traced way of the same strategy that is most like a way; None: no such way was traced."""
        alike = (traced for traced in self._largest if traced and traced.strategy == way.strategy)
        return min(alike, key=lambda traced: _doublings(way, traced), default=None)

    def least_bytes(self, candidate: Candidate) -> float:
        """The least bytes of a candidate: the closest of the bounds that traced candidates give, if these are
        like the candidate in some way."""
        like = ((margin, self._excess.get(key)) for margin, key in _likenesses(candidate))
        bounds = (min(each.least(candidate) for each in known) / margin for margin, known in like if known)
        return max(bounds, default=candidate.estimated_bytes / _MARGIN_OF_UNKNOWN)

    def most_bytes(self, candidate: Candidate) -> float:
        """The most bytes of a candidate, by the same bounds."""
        like = ((margin, self._excess.get(key)) for margin, key in _likenesses(candidate))
        bounds = (max(each.most(candidate) for each in known) * margin for margin, known in like if known)
        return min(bounds, default=candidate.estimated_bytes * SURELY)

    def _slowest_part(self, strategy: str) -> float:
        """The largest factor of the parts of a strategy that were traced alone, or in several others: none of
        them takes less than in any of these. Where no part was, -inf."""
        of_parts = [ways for part in strategy.split(PLUS) if (ways := self._ways_of_part(part))]
        return max((min(map(self._factor, ways)) for ways in of_parts), default=-math.inf)

    def _relatives(self, strategy: str) -> float:
        """The factor of a strategy that was not traced: that of its slowest traced part, and else the mean of
        those that share a part with it, or of all, and no more than 1, with the benefit of the doubt, so that
        none is left to the end."""
        ways = [way for part in strategy.split(PLUS) for way in self._parts.get(part, ())]
        factors = [*map(self._factor, ways or self._largest)]
        mean = sum(factors) / len(factors) if factors else 0.0
        return max(min(0.0, mean) - _BENEFIT, self._slowest_part(strategy))

    def _factor(self, way: Way | None) -> float:
        return float(self._factors[self._columns[way]])


def _likenesses(candidate: Candidate) -> Iterator[tuple[float, Hashable]]:
    """What candidates have in common whose memory is alike, each with the margin of bytes for these."""
    way, saving, pp = candidate.layout.way, candidate.saving_text, candidate.layout.pp
    yield 1.03, (way, pp, saving, candidate.layout.fold)
    yield 1.05, (candidate.strategy, pp, saving, candidate.training_text)
    yield 1.05, (way, pp, candidate.training_text, candidate.layout.fold)
    yield 1.05, way
    yield 1.06, candidate.strategy


def _doublings(way: Way, other: Way | None) -> float:
    """How many doublings of ranks along an axis lie between two ways; infinitely many to none."""
    if other is None:
        return math.inf
    return round(sum(abs(math.log2(n / other.axes[axis])) for axis, n in way.axes.items()))
