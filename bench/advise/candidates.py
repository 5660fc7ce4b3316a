"""The candidates of a search, with their estimates, and what traces have taught about these."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.advise.estimates import Estimates, WayFigures
from spbench.bench.advise.layouts import (
    ORDER,
    Layout,
    Refused,
    Way,
    backend_settings,
    layouts,
    strategy_settings,
    ways,
)
from spbench.bench.advise.question import Question
from spbench.bench.advise.references import as_text
from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.impls.axes import MESH_AXES
from spbench.impls.layout import Unsupported
from spbench.impls.registries import backend_class

#: seconds may be off by this much more than what was learned says, and by this much for each doubling of
#: ranks along an axis from what was traced, and for a backend and a size of micro-batches that were traced
#: nowhere; bytes by this much
_MARGIN, _MARGIN_OF_STEP, _MARGIN_OF_BYTES = 1.03, 1.08, 1.1
#: a layout whose estimated bytes are so much less than a card has surely fits
_SURELY = 2.0
#: what became of layouts that take longer than another that surely fits
SLOWER = "slower than with other settings that surely fit"
#: weights of the pull of factors to 1
_PULL_OF_WAY, _PULL = 1e-3, 0.3


def ordered(sizes: Mapping[str, int], order: Sequence[str] = ORDER) -> list[str] | None:
    """The axes of several ranks in that order; None: as they are by default."""
    axes = [axis for axis in order if sizes.get(axis, 1) > 1]
    return None if axes == sorted(axes, key=MESH_AXES.index) else axes


#: a choice and its value
Variant = tuple[str, str]


@dataclass(frozen=True)
class Candidate:
    """A layout with a backend and settings of the model.

    Attributes:
        options: of the strategy.
        training: backend and its options.
        saving: settings of the model that take less memory.
        estimated_s, estimated_bytes: of a step, and of the fullest rank.
    """

    layout: Layout
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    saving: Mapping[str, Any]
    estimated_s: float
    estimated_bytes: float

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.layout.way.strategy

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """What another layout of the same way may have other than this one."""
        return ("backend", as_text(self.training)), ("micro-batch", str(self.layout.micro_batch))

    @cached_property
    def states(self) -> str:
        """What layouts have in common whose states of training are divided alike."""
        return f"{self.layout.way} {as_text(self.training)}"

    def cell(self, asked: Cell) -> Cell:
        """The cell that it makes of the one that was asked about."""
        layout, (batch, _) = self.layout, asked.shape
        training = {**asked.training.model_dump(exclude_defaults=True), **self.training}
        if asked.training.step == "training":
            training["micro_batches"] = batch // (layout.dp * layout.micro_batch)
        if layout.virtual_stages > 1:
            training |= {"schedule": "interleaved", "virtual_stages": layout.virtual_stages}
        return asked.model_copy(
            update={
                "mesh": ordered(layout.sizes),
                "strategy": self.strategy,
                "strategy_options": dict(self.options),
                "sizes": Sizes(**layout.sizes),
                "model_options": {**asked.model_options, **self.saving},
                "training": TrainingOptions.model_validate(training),
            }
        )


def candidates(
    question: Question,
    estimates: Estimates,
    savings: Mapping[str, Mapping[str, Any]],
    refused: Refused,
    usable: float = 0.0,
    left_out: Counter[str] | None = None,
) -> Iterator[Candidate]:
    """All layouts of a question, with every backend and saving that there is a figure of; of a layout and
    backend none that takes longer by the estimate than another that surely fits.

    Args:
        savings: settings of the model by their text.
        refused: takes what cannot be.
        usable: bytes of a card that tensors can have; 0: nothing surely fits.
        left_out: counts those that take longer, as :data:`SLOWER`.
    """
    forward_only = question.cell.training.step == "inference"
    known = {"": {}} if forward_only else {as_text(each): each for each in backend_settings(question)}
    backends = [known[text] for text in estimates.backends]
    pipelined = [bool(each) and backend_class(each["backend"]).pipelined for each in backends]
    settings = [savings[text] for text in estimates.references]
    for way in ways(question):
        made = _figures(estimates, way, question.heeded, refused)
        if made is None:
            continue
        figures, options = made
        for layout in layouts(question, way, estimates.layers, refused):
            times, memories = estimates.times(layout, figures), estimates.memories(layout, figures)
            # of each backend the shortest time with which it surely fits
            surely = np.where(memories * _SURELY <= usable, times, np.inf).min(axis=1, initial=np.inf)
            for row, training in enumerate(backends):
                if layout.pp > 1 and not pipelined[row]:
                    continue
                for at, (seconds, nbytes) in enumerate(zip(times[row], memories[row], strict=True)):
                    if seconds <= surely[row]:
                        yield Candidate(
                            layout, options, training, settings[at], float(seconds), float(nbytes)
                        )
                    elif left_out is not None:
                        left_out[SLOWER] += 1


def _figures(
    estimates: Estimates, way: Way, heeded: Collection[str], refused: Refused
) -> tuple[WayFigures, Mapping[str, Any]] | None:
    """With the first of the strategy's settings that can be; None: none can."""
    reason = ""
    for options in strategy_settings(way.strategy, heeded):
        try:
            return estimates.figures(way, options), options
        except Unsupported as refusal:
            reason = str(refusal)
    refused.add(str(way), reason)
    return None


class Learned:
    """How far estimates were off: traced over estimated.

    Of seconds, a factor of each way, times one of each backend and one of each size of micro-batches, by
    least squares of their logarithms; of bytes, the least by way and backend.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Candidate, float]] = []
        self._strategies: set[str] = set()
        self._of_ways: dict[Way, float] = {}
        self._of_variants: dict[Variant, float] = {}
        self._nearest: dict[Way, tuple[Way, int]] = {}
        self._larger: dict[str, list[float]] = {}

    def knows(self, strategy: str) -> bool:
        """Whether a layout of it was traced."""
        return strategy in self._strategies

    def add(self, candidate: Candidate, seconds: float, nbytes: float) -> None:
        """What a trace of a candidate found."""
        self._seen.append((candidate, math.log(seconds / candidate.estimated_s)))
        for name in (candidate.strategy, candidate.states):
            self._larger.setdefault(name, []).append(nbytes / candidate.estimated_bytes)
        self._strategies.add(candidate.strategy)
        self._of_ways[candidate.layout.way] = 0.0
        self._nearest.clear()

    def fit(self) -> None:
        """Work out the factors, once something was traced."""
        if not self._seen:
            return
        ways = list(self._of_ways)
        variants = list(dict.fromkeys(each for c, _ in self._seen for each in c.variants))
        columns: dict[Hashable, int] = {name: at for at, name in enumerate([*ways, *variants])}
        matrix = np.zeros((len(self._seen), len(columns)))
        for row, (candidate, _) in enumerate(self._seen):
            for name in (candidate.layout.way, *candidate.variants):
                matrix[row, columns[name]] = 1.0
        off = np.array([each for _, each in self._seen])
        # a little pull to 1, so that what one way alone was traced with is not taken for the way's own
        pull = np.diag([_PULL_OF_WAY] * len(ways) + [_PULL] * len(variants))
        factors = np.linalg.solve(matrix.T @ matrix + pull, matrix.T @ off)
        self._of_ways = {way: float(factors[columns[way]]) for way in ways}
        self._of_variants = {name: float(factors[columns[name]]) for name in variants}

    def expected_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate probably takes: of an unknown strategy by the estimate alone."""
        near = self._near(candidate.layout.way)
        if near is None:
            return candidate.estimated_s
        off = self._of_ways[near[0]] + sum(self._of_variants.get(each, 0.0) for each in candidate.variants)
        return candidate.estimated_s * math.exp(off)

    def least_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate takes at the least, of a strategy of which layouts were traced."""
        near = self._near(candidate.layout.way)
        assert near is not None
        unknown = sum(each not in self._of_variants for each in candidate.variants)
        return self.expected_s(candidate) / (_MARGIN * _MARGIN_OF_STEP ** (near[1] + unknown))

    def least_bytes(self, candidate: Candidate) -> float:
        """Bytes that a candidate takes at the least: by traces of the same way and backend, or else by the
        estimate."""
        if known := self._larger.get(candidate.states):
            return candidate.estimated_bytes * min(known) / _MARGIN_OF_BYTES
        known = [1.0, *self._larger.get(candidate.strategy, [])]
        return candidate.estimated_bytes * min(known) / _MARGIN_OF_BYTES

    def _near(self, way: Way) -> tuple[Way, int] | None:
        """The way of the same strategy that is most like this one and was traced, and how many doublings of
        ranks along an axis lie between."""
        if way not in self._nearest:
            alike = [known for known in self._of_ways if known.strategy == way.strategy]
            if not alike:
                return None
            nearest = min(alike, key=lambda known: _doublings(way, known))
            self._nearest[way] = nearest, _doublings(way, nearest)
        return self._nearest[way]


def _doublings(way: Way, other: Way) -> int:
    return round(sum(abs(math.log2(n / other.axes[axis])) for axis, n in way.axes.items()))
