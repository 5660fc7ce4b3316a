"""What traces teach of candidates: corrections to their estimates, and which strategies take the same steps;
and the candidates that still wait."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from spbench.bench.tools.choose.candidates import SURELY, Candidate, Variant
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.layouts import Way
from spbench.impls import PLUS

#: standard deviations of logarithms: of traced seconds around their factors; and, before any trace, of the
#: factor of a way, and of a backend or a size of micro-batches
_NOISE, _SD_OF_WAY, _SD = 0.03, 1.0, 0.1
#: seconds may be off by this factor for each doubling of ranks along an axis from the traced way
_MARGIN_OF_STEP = 1.08
#: until a layout of a strategy was traced, its estimated seconds may be off by this factor; and by the second
#: factor from the seconds of its slowest part, if that was traced alone or in several others
UNKNOWN, _OF_PARTS = 1.35, 1.1
#: until a layout of a strategy was traced, its estimated bytes may be too many by this factor
_MARGIN_OF_UNKNOWN = 1.25
#: an excess of bytes grows at most by this factor for a candidate with more activations
_MOST_SHARE = 2.0
#: steps are the same if their seconds and bytes differ by no larger share; two strategies must take the same
#: steps on this many choices of ranks along axes to count as the same
_SAME, _ENOUGH = 1e-3, 2
#: what became of layouts whose strategy takes the same steps as another
SAME_STEP = "the same step by another strategy"
#: the advantage, in logarithms of seconds, that puts an untraced strategy before others as fast
_BENEFIT = 0.1

#: a kind of verdict, such as the looks of a search
AnyVerdict = TypeVar("AnyVerdict", bound=Verdict)


class Waiting:
    """Candidates that wait for a trace, as arrays, because many GPUs have a million candidates.

    Attributes:
        candidates: all candidates, also those that were taken.
        estimated_s: estimated seconds of each candidate.
        ways, variants: all ways and variants that candidates have.
        places: for each candidate, the indices of its way and of its variants.
        left: for each candidate, whether it still waits.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.estimated_s = np.array([each.estimated_s for each in candidates], dtype=float)
        ways: dict[Way, int] = {}
        variants: dict[Variant, int] = {}
        places = [
            (
                ways.setdefault(each.layout.way, len(ways)),
                *(variants.setdefault(variant, len(variants)) for variant in each.variants),
            )
            for each in candidates
        ]
        self.places = np.array(places, dtype=int)
        self.ways, self.variants = [*ways], [*variants]
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
        """The indices of candidates with less complexity than ``than`` (or as much, if their strategy was not
        traced) that probably take at most ``most_s`` and may fit: the simplest for each strategy and mesh."""
        every, near = self.candidates, np.flatnonzero(self.left & (expected_s <= most_s)).tolist()
        places, kinds = [at for at in near if every[at].complexity <= than], set()
        for at in sorted(places, key=lambda at: (every[at].complexity, expected_s[at])):
            each = every[at]
            new = each.kind not in kinds and (each.complexity < than or not known(each.strategy))
            if new and may_fit(each):
                kinds.add(each.kind)
                yield at

    def take(self, places: Iterable[int]) -> None:
        """Mark the candidates at these indices as no longer waiting."""
        self.left[[*places]] = False

    def leave_out(self, of_strategy: Callable[[str], bool]) -> int:
        """Leave out the candidates of strategies that the function accepts; returns how many waited."""
        of_ways = np.array([of_strategy(way.strategy) for way in self.ways], dtype=bool)
        gone = self.left & of_ways[self.places[:, 0]]
        self.left &= ~gone
        return int(gone.sum())


class Excess(NamedTuple):
    """The bytes ``more`` that the traced candidate ``of`` took than estimated. Their kind is unknown: a
    constant, a share of all bytes, buffers of a rank's part of the samples, activations, or activations that
    each rank along an axis has whole."""

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
        """For each kind of bytes, the excess of another candidate divided by the traced one's, if the excess
        is of that kind."""
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
    """Seconds that candidates probably take, and seconds that they take at least, each [candidates]."""

    expected_s: np.ndarray
    least_s: np.ndarray


class Learned:
    """Corrections to the estimates, from traced candidates.

    Seconds: one factor per way, per backend and per size of micro-batches, fitted to traced over estimated
    seconds by Bayesian least squares of their logarithms. If the ways traced with a size of micro-batches
    were traced with no other size, the factor of that size stays uncertain, because it cannot be separated
    from the ways' factors. Bytes: the traced excess over the estimate of the candidates that are most alike.

    Also which strategies take the same steps, by traces of layouts that differ only in strategy. Odysseus
    leaves an MLP's weights whole, and Megatron-SP splits them; but if experts replace all MLPs, both
    strategies divide only attention, in the same way.

    Attributes:
        replaced: for each part of a strategy that takes the same steps as another part, the alphabetically
            first.
    """

    def __init__(self) -> None:
        #: traced candidates, each with its seconds and bytes
        self._seen: list[tuple[Candidate, float, float]] = []
        #: the traced ways, each once
        self._ways: dict[Way, None] = {}
        self._excess: dict[Hashable, list[Excess]] = {}
        self.fit()

    def knows(self, strategy: str) -> bool:
        """Whether a layout of a strategy was traced."""
        return strategy in self._excess

    def knows_parts(self, strategy: str) -> bool:
        """Whether a layout with each part of a strategy was traced."""
        return {*strategy.split(PLUS)} <= {part for way in self._ways for part in way.strategy.split(PLUS)}

    def unsettled_parts(self, strategy: str) -> set[str]:
        """The parts of a strategy that were traced neither alone nor in several other strategies, so that
        their share of a step is unknown."""
        return {part for part in strategy.split(PLUS) if not self._ways_of_part(part)}

    def _ways_of_part(self, part: str) -> Sequence[Way]:
        """The traced ways with a part, if the part was traced alone or in several strategies; else none."""
        ways = [way for way in self._ways if part in way.strategy.split(PLUS)]
        strategies = {way.strategy for way in ways}
        return ways if part in strategies or len(strategies) > 1 else []

    def add(self, candidate: Candidate, seconds: float, nbytes: float) -> None:
        """Record the seconds and bytes of a trace of the candidate."""
        self._seen.append((candidate, seconds, nbytes))
        excess = Excess(nbytes - candidate.estimated_bytes, candidate)
        for _, key in _likenesses(candidate):
            self._excess.setdefault(key, []).append(excess)
        self._ways[candidate.layout.way] = None

    def fit(self) -> None:
        """Fit the logarithms of all factors, and their covariance, to the recorded traces."""
        self.replaced = self._same_steps()
        variants = list(dict.fromkeys(each for c, *_ in self._seen for each in c.variants))
        columns: dict[Hashable, int] = {name: at for at, name in enumerate([*self._ways, *variants])}
        matrix = np.zeros((len(self._seen), len(columns)))
        for row, (candidate, *_) in enumerate(self._seen):
            matrix[row, [columns[name] for name in (candidate.layout.way, *candidate.variants)]] = 1.0
        off = np.array([math.log(seconds / c.estimated_s) for c, seconds, _ in self._seen])
        before = np.array([_SD_OF_WAY] * len(self._ways) + [_SD] * len(variants))
        self._columns = columns
        self._covariance = np.linalg.inv(matrix.T @ matrix / _NOISE**2 + np.diag(before**-2.0))
        # the last factor is that of untraced ways and variants
        self._factors = np.append(self._covariance @ matrix.T @ off / _NOISE**2, 0.0)

    def _same_steps(self) -> Mapping[str, str]:
        """The mapping :attr:`replaced`, from the recorded traces."""
        # by ranks (first those along axes) and settings, the seconds and bytes of each strategy
        numbers = defaultdict[tuple[Hashable, ...], dict[str, tuple[float, float]]](dict)
        for candidate, *traced in self._seen:
            layout, axes = candidate.layout, tuple(candidate.layout.way.axes.items())
            ranks = axes, layout.dp, layout.pp, layout.micro_batch, layout.virtual_stages, layout.fold
            settings = candidate.training_text, candidate.saving_text
            numbers[*ranks, *settings][candidate.strategy] = (traced[0], traced[1])
        # by two strategies, whether their steps were the same on each of the axes
        alike = defaultdict[tuple[str, str], dict[Hashable, bool]](dict)
        for (along, *_), of_strategies in numbers.items():
            for (one, a), (other, b) in itertools.combinations(of_strategies.items(), 2):
                if pair := _differing(one, other):
                    same = all(abs(x - y) <= _SAME * y for x, y in zip(a, b, strict=True))
                    alike[pair][along] = alike[pair].get(along, True) and same
        same_pairs = sorted(pair for pair, of in alike.items() if len(of) >= _ENOUGH and all(of.values()))
        return {second: first for first, second in reversed(same_pairs)}

    def instead(self, strategy: str) -> str:
        """The strategy that represents all with the same steps as ``strategy``; perhaps itself."""
        return PLUS.join(self.replaced.get(part, part) for part in strategy.split(PLUS))

    def without_same(self, seen: Sequence[AnyVerdict]) -> list[AnyVerdict]:
        """The cells without those that take the same steps as another cell on the same mesh."""
        there = {(each.cell.strategy, each.cell.mesh_text) for each in seen}
        both = ((each, self.instead(each.cell.strategy)) for each in seen)
        return [e for e, other in both if e.cell.strategy == other or (other, e.cell.mesh_text) not in there]

    def bounds(self, waiting: Waiting) -> Bounds:
        """The bounds on the seconds of candidates; each way has the factor of the traced way of its strategy
        that is fewest doublings of ranks away."""
        unknown, strategies = len(self._columns), [way.strategy for way in waiting.ways]
        relatives = {each: self._relatives(each) for each in dict.fromkeys(strategies)}
        # the traced ways of each strategy, of which the one most like a way counts
        alike = {each: [way for way in self._ways if way.strategy == each] for each in relatives}
        nearest = [min(alike[w.strategy], key=partial(_doublings, w), default=None) for w in waiting.ways]
        way_at, *variants_at = waiting.places.T
        ways = np.array([self._columns.get(each, unknown) for each in nearest], dtype=int)[way_at]
        variants = np.array([self._columns.get(each, unknown) for each in waiting.variants], dtype=int)
        columns = [ways, *(variants[at] for at in variants_at)]
        off = np.array([relatives[each] for each in strategies], dtype=float)[way_at]
        off = np.where(ways < unknown, self._factors[ways], off)
        off = off + sum(self._factors[each] for each in columns[1:])
        both = zip(waiting.ways, nearest, strict=True)
        doublings = np.array([_doublings(*each) for each in both], dtype=float)[way_at]
        margins = self._deviations(columns) + doublings * math.log(_MARGIN_OF_STEP)
        parts = np.array([self._slowest_part(each) for each in strategies], dtype=float)[way_at]
        of_parts = np.maximum(parts - math.log(_OF_PARTS), -math.log(UNKNOWN))
        least = np.where(ways < unknown, off - margins, of_parts)
        return Bounds(*(waiting.estimated_s * np.exp(each) for each in (off, least)))

    def _deviations(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Standard deviations of sums of factors, one sum for each candidate; an unknown factor has the
        variance from before any trace, and depends on no other factor."""
        own = np.append(np.diag(self._covariance), _SD**2)
        others = np.pad(self._covariance - np.diag(np.diag(self._covariance)), (0, 1))
        crossed = sum(others[a, b] for a, b in itertools.combinations(columns, 2))
        deviations: np.ndarray = np.sqrt(sum(own[at] for at in columns) + 2 * crossed)
        return deviations

    def least_bytes(self, candidate: Candidate) -> float:
        """The least bytes of a candidate: the highest of the lower bounds that traced candidates give which
        are like it in some property."""
        like = ((margin, self._excess.get(key)) for margin, key in _likenesses(candidate))
        bounds = (min(each.least(candidate) for each in known) / margin for margin, known in like if known)
        return max(bounds, default=candidate.estimated_bytes / _MARGIN_OF_UNKNOWN)

    def most_bytes(self, candidate: Candidate) -> float:
        """The most bytes of a candidate: the lowest of the upper bounds that like candidates give."""
        like = ((margin, self._excess.get(key)) for margin, key in _likenesses(candidate))
        bounds = (max(each.most(candidate) for each in known) * margin for margin, known in like if known)
        return min(bounds, default=candidate.estimated_bytes * SURELY)

    def _relatives(self, strategy: str) -> float:
        """The factor (a logarithm) of an untraced strategy: that of its slowest traced part, or the mean of
        the ways that share a part with it (else of all), at most 0 and with :data:`_BENEFIT`, so that no
        strategy is left to the end; the larger of the two."""
        parts = strategy.split(PLUS)
        sharing = [way for part in parts for way in self._ways if part in way.strategy.split(PLUS)]
        factors = [*map(self._factor, sharing or self._ways)]
        mean = sum(factors) / max(1, len(factors))
        return max(min(0.0, mean) - _BENEFIT, self._slowest_part(strategy))

    def _slowest_part(self, strategy: str) -> float:
        """The largest factor (a logarithm) of a strategy's parts that were traced alone or in several others;
        a part has the least factor of the ways that were traced with it. -inf: no part was traced so."""
        of_parts = [ways for part in strategy.split(PLUS) if (ways := self._ways_of_part(part))]
        return max((min(map(self._factor, ways)) for ways in of_parts), default=-math.inf)

    def _factor(self, way: Way) -> float:
        return float(self._factors[self._columns[way]])


def _likenesses(candidate: Candidate) -> Iterator[tuple[float, Hashable]]:
    """(margin of bytes, key) for each set of properties that a candidate shares with candidates whose memory
    is alike, the closest first."""
    way, saving, pp = candidate.layout.way, candidate.saving_text, candidate.layout.pp
    yield 1.03, (way, pp, saving, candidate.layout.fold)
    yield 1.05, (candidate.strategy, pp, saving, candidate.training_text)
    yield 1.05, (way, pp, candidate.training_text, candidate.layout.fold)
    yield 1.05, way
    yield 1.06, candidate.strategy


def _doublings(way: Way, other: Way | None) -> float:
    """How many doublings of ranks along axes lie between two ways; infinite if ``other`` is None."""
    if other is None:
        return math.inf
    return round(sum(abs(math.log2(n / other.axes[axis])) for axis, n in way.axes.items()))


def _differing(strategy: str, other: str) -> tuple[str, str] | None:
    """The two parts, sorted, in which two strategies differ; None: they do not differ in exactly one part."""
    own, others = strategy.split(PLUS), other.split(PLUS)
    parts = [pair for pair in zip(own, others, strict=False) if pair[0] != pair[1]]
    if len(own) != len(others) or len(parts) != 1:
        return None
    first, second = sorted(parts[0])
    return first, second
