"""What traces have taught about the candidates that wait for one. Each candidate is taken for the traced one
of its strategy that is most like it: its estimate is off by as much, and by more or less the more they
differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from spbench.bench.tools.choose.candidates import SURELY, Candidate
from spbench.impls import MESH_AXES, PLUS

#: by so much, of logarithms, may seconds be off beside those of the traced candidate: whatever it is, more
#: for each doubling of ranks along an axis, and for another backend, size of micro-batches or division of
#: experts
_NOISE, _OF_DOUBLING, _OF_OTHER = 0.03, 0.077, 0.1
#: so many traces count before the margins shrink by what these were really off
_DOUBTED = 4
#: until a layout of a strategy was traced, its estimated seconds may be too high, or too low, by so much; and
#: by so much beside those of its slowest part, where one was traced alone or in several others
UNKNOWN, _OF_PARTS = 1.35, 1.1
#: by so much, in logarithms, is a strategy that was not traced looked at before others as fast
_BENEFIT = 0.1
#: by so much may bytes be off beside those of the traced candidate, and by so much more for each other
#: setting, and for each doubling of ranks; until one was traced, estimated bytes may be too many by so much
_MARGIN, _OF_DIFFERENCE, _OF_HALF, _MARGIN_OF_UNKNOWN = 1.03, 0.04, 0.1, 1.25


class Bounds(NamedTuple):
    """What candidates take, each [candidates]: seconds probably and at the least, bytes at the least and at
    the most."""

    expected_s: np.ndarray
    least_s: np.ndarray
    least_bytes: np.ndarray
    most_bytes: np.ndarray


class _Nearest:
    """By candidate, the traced one that is most like it, and how far that is: inf where none of its strategy
    was traced.

    Args:
        features: [candidates, features]: numbers by which candidates differ.
        weights: of a difference by one, and of any difference of what is only the same or not: [features].
        of_kind: whether a feature is only the same or not: [features].
    """

    def __init__(self, features: np.ndarray, weights: np.ndarray, of_kind: np.ndarray):
        self._features, self._weights, self._of_kind = features, weights, of_kind
        self.far = np.full(len(features), np.inf)
        self.at = np.zeros(len(features), dtype=int)

    def add(self, at: int, alike: np.ndarray) -> None:
        """A trace of the candidate at a place; ``alike``: the places of all of its strategy."""
        apart = np.abs(self._features[alike] - self._features[at])
        apart = np.where(self._of_kind, apart > 0, apart) @ self._weights
        nearer = apart < self.far[alike]
        self.far[alike[nearer]], self.at[alike[nearer]] = apart[nearer], at


class Learned:
    """The candidates of a search, as arrays, and what traces of some say of the others.

    Attributes:
        candidates: all, also those that were taken.
        left: [candidates]: whether each still waits for a trace.
    """

    def __init__(self, candidates: Sequence[Candidate]):
        self.candidates = candidates
        self.left = np.ones(len(candidates), dtype=bool)
        self._estimated = np.array([(c.estimated_s, c.estimated_bytes) for c in candidates], dtype=float)
        self._estimated = self._estimated.reshape(-1, 2)
        self._names, self._strategy = _numbered(c.strategy for c in candidates)
        layouts = [each.layout for each in candidates]
        ranks = [[each.way.axes.get(axis, 1) for axis in MESH_AXES] + [each.pp] for each in layouts]
        self._micro_batches = np.array([each.micro_batch for each in layouts], dtype=float)
        others = (
            (c.training_text for c in candidates),
            (each.micro_batch for each in layouts),
            (each.fold for each in layouts),
            (c.saving_text for c in candidates),
        )
        numbered = [_numbered(each)[1] for each in others]
        features = np.column_stack(
            [np.log2(np.array(ranks, float).reshape(-1, len(MESH_AXES) + 1)), *numbered]
        )
        of_kind = np.array([False] * (len(MESH_AXES) + 1) + [True] * len(others))
        in_time = [_OF_DOUBLING] * len(MESH_AXES) + [0] + [_OF_OTHER] * 3 + [0]
        self._in_time = _Nearest(features, np.array(in_time), of_kind)
        self._in_memory = _Nearest(features, np.where(of_kind, _OF_DIFFERENCE, _OF_HALF), of_kind)
        #: [candidates, 2]: seconds and bytes of those that were traced
        self._traced = np.zeros((len(candidates), 2))
        #: how far traced seconds were from expected ones, in margins, squared; as if some were by one before
        self._surprises = [1.0] * _DOUBTED
        #: by strategy that was traced, the least logarithm of traced over estimated seconds
        self._off: dict[str, float] = {}

    def __len__(self) -> int:
        return int(self.left.sum())

    def add(self, at: int, seconds: float, nbytes: float) -> None:
        """What a trace of the candidate at a place found."""
        name, off = self.candidates[at].strategy, math.log(seconds / self._estimated[at, 0])
        if np.isfinite(far := self._in_time.far[at]):
            self._surprises.append(((off - self._off_of(at)) / (_NOISE + far)) ** 2)
        self._traced[at] = seconds, nbytes
        alike = np.flatnonzero(self._strategy == self._strategy[at])
        self._in_time.add(at, alike)
        self._in_memory.add(at, alike)
        self._off[name] = min(off, self._off.get(name, math.inf))

    def _off_of(self, places: Any) -> Any:
        """log(traced / estimated seconds) of the traced layouts that are most like those at ``places``."""
        like = self._in_time.at[places]
        return np.log(self._traced[like, 0] / self._estimated[like, 0])

    def _slope(self) -> float:
        """By how much log(traced / estimated seconds) grows as micro-batches double: least squares over the
        traced layouts of each way, with one more pair, whose log does not grow, to hold the slope down."""
        traced = np.flatnonzero(self._traced[:, 0]).tolist()
        traced.sort(key=lambda at: str(self.candidates[at].layout.way))
        both, squares = 0.0, 1.0
        for _, of_way in itertools.groupby(traced, lambda at: str(self.candidates[at].layout.way)):
            places = [*of_way]
            doublings = np.log2(self._micro_batches[places])
            off = np.log(self._traced[places, 0] / self._estimated[places, 0])
            both += float((doublings - doublings.mean()) @ off)
            squares += float(((doublings - doublings.mean()) ** 2).sum())
        return both / squares

    # -- strategies ------------------------------------------------------------------------------------

    def knows(self, strategy: str) -> bool:
        """Whether a layout of the strategy was traced."""
        return strategy in self._off

    def knows_parts(self, strategy: str) -> bool:
        """Whether a layout of each part of the strategy was traced."""
        traced = {part for name in self._off for part in name.split(PLUS)}
        return {*strategy.split(PLUS)} <= traced

    def unsettled_parts(self, strategy: str) -> set[str]:
        """The parts of a strategy whose share of the excess is unknown, because they were traced neither
        alone nor within several other strategies."""
        return {part for part in strategy.split(PLUS) if self._of_part(part) is None}

    def _of_part(self, part: str) -> float | None:
        """The least that a part was off by; None: it is not settled."""
        offs = {name: off for name, off in self._off.items() if part in name.split(PLUS)}
        return min(offs.values()) if part in offs or len(offs) > 1 else None

    def _unknown(self, strategy: str) -> tuple[float, float]:
        """The logarithms of seconds over estimated ones of a strategy that was not traced, probably and at
        the least. None of its parts takes less than in any strategy that has it."""
        parts = {*strategy.split(PLUS)}
        slowest = max((off for each in parts if (off := self._of_part(each)) is not None), default=-math.inf)
        akin = [off for name, off in self._off.items() if parts & {*name.split(PLUS)}] or [
            *self._off.values()
        ]
        mean = sum(akin) / max(1, len(akin))
        least = max(slowest - math.log(_OF_PARTS), -math.log(UNKNOWN))
        return max(slowest, min(0.0, mean) - _BENEFIT), least

    # -- candidates ------------------------------------------------------------------------------------

    def bounds(self) -> Bounds:
        """What candidates take. Where micro-batches are larger than the traced candidate's, what its step
        took beside the estimate may be of each micro-batch, as where the host is slower than the card."""
        (seconds, nbytes), near = self._estimated.T, self._in_time
        margins = (_NOISE + near.far) * math.sqrt(sum(self._surprises) / len(self._surprises))
        larger = np.log2(self._micro_batches / self._micro_batches[near.at])
        with np.errstate(divide="ignore", invalid="ignore"):  # of those that are like none
            off = self._off_of(slice(None))
            fewer = np.log1p(np.expm1(off) * np.minimum(1.0, np.exp2(-larger)))
        off = off + self._slope() * larger
        least = np.minimum(off, np.where(off > 0, fewer, off)) - margins
        unknown = np.array([self._unknown(name) for name in self._names]).reshape(-1, 2)[self._strategy]
        known = np.isfinite(near.far)
        off, least = (np.where(known, a, b) for a, b in zip((off, least), unknown.T, strict=True))
        like, margin = self._in_memory.at, _MARGIN + np.where(known, self._in_memory.far, 0.0)
        # what a trace took more may be the same for all, or a share
        more = self._traced[like, 1] - nbytes[like]
        both = nbytes + more, nbytes * self._traced[like, 1] / nbytes[like]
        return Bounds(
            seconds * np.exp(off),
            seconds * np.exp(least),
            np.where(known, np.minimum(*both) / margin, nbytes / _MARGIN_OF_UNKNOWN),
            np.where(known, np.maximum(*both) * margin, nbytes * SURELY),
        )

    def simpler(
        self, than: tuple[int, ...], bounds: Bounds, most_s: float, most_bytes: float
    ) -> Iterator[int]:
        """The places of those with less complexity, or as much where their strategy is not known, that
        probably take no longer and may fit, the simplest first; of each strategy and mesh one."""
        near = self.left & (bounds.expected_s <= most_s) & (bounds.least_bytes <= most_bytes)
        every, kinds = self.candidates, set()
        places = [at for at in np.flatnonzero(near).tolist() if every[at].complexity <= than]
        for at in sorted(places, key=lambda at: (every[at].complexity, bounds.expected_s[at])):
            each = every[at]
            if each.kind not in kinds and (each.complexity < than or not self.knows(each.strategy)):
                kinds.add(each.kind)
                yield at

    def take(self, places: Iterable[int]) -> None:
        """Leave out the candidates at these places."""
        self.left[[*places]] = False

    def leave_out(self, of_strategy: Callable[[str], bool]) -> int:
        """Leave out the candidates of these strategies; returns how many still waited."""
        gone = self.left & np.array([of_strategy(name) for name in self._names], dtype=bool)[self._strategy]
        self.left &= ~gone
        return int(gone.sum())


def _numbered(values: Iterable[Hashable]) -> tuple[list[Any], np.ndarray]:
    """The different values, and of each of all its place among these."""
    places: dict[Hashable, int] = {}
    numbers = [places.setdefault(each, len(places)) for each in values]
    return [*places], np.array(numbers, dtype=int)
