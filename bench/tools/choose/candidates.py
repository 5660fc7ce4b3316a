"""The candidates of a search: layouts with a backend and memory-saving settings, each with its estimates."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.tools.choose.estimates import Estimates, WayFigures
from spbench.bench.tools.choose.layouts import (
    ORDER,
    Layout,
    Refused,
    Way,
    backend_settings,
    folded,
    layouts,
    settings_of,
    things_to_set,
    ways,
)
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.references import as_text, has_stages, twins_of
from spbench.impls import MESH_AXES, Unsupported, spelled

#: a layout surely fits if a card has this many times its estimated bytes
SURELY = 2.0
#: a layout probably fits if its estimated bytes times this fit a card, and may fit if they do divided by this
_MAY_FIT = 1.25
#: further settings must be faster than simpler ones that surely fit by this factor, by the estimate
_SAME = 1.005
#: what became of layouts that take longer than another that surely fits
SLOWER = "slower than with other settings that surely fit"
#: what became of layouts that were not traced, or not even made candidates
TOO_SLOW = "too slow by the estimate, or too large after traces of their strategy"
#: what became of layouts that are no candidates because of their estimated bytes
TOO_LARGE = "need too much by the estimate"
#: a layout with more than this many times a card's bytes, by the estimate, is not traced
FAR_TOO_LARGE = 1.25
#: how many kinds of layouts the answer names; a layout is left out at once if its estimated seconds are this
#: many times those of as many kinds that probably fit
_NAMED, _FAR = 5, 1.6
#: of one layout, settings that take this many times longer than others without more bytes are left out
_DOMINATED = 1.1


def ordered(sizes: Mapping[str, int], order: Sequence[str] = ORDER) -> list[str] | None:
    """The axes of two or more ranks, sorted by ``order``; None if that is the mesh's default order."""
    axes = [axis for axis in order if sizes.get(axis, 1) > 1]
    return None if axes == sorted(axes, key=MESH_AXES.index) else axes


def kind_of_layout(strategy: str, sizes: Mapping[str, int]) -> tuple[str, str]:
    """(strategy, mesh as text) without ranks of experts and without an order of the axes; the answer names
    only the best layout of each such kind."""
    return strategy, spelled({axis: sizes[axis] for axis in ORDER if axis in sizes})


#: (a choice, such as "backend"; its value as text)
Variant = tuple[str, str]


@dataclass(frozen=True)
class Candidate:
    """A layout with a backend and memory-saving settings of the model.

    Attributes:
        options: options of the strategy.
        training: the backend and its options.
        saving: settings of the model that take less memory.
        training_text, saving_text: the same as text.
        estimated_s, estimated_bytes: seconds of a step, and bytes of the fullest rank.
        activation_bytes: the part of the estimated bytes that is no states of training.
        twin: the same ``training`` with all states on the card; None: it has none on the host.
    """

    layout: Layout
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    saving: Mapping[str, Any]
    training_text: str
    saving_text: str
    estimated_s: float
    estimated_bytes: float
    activation_bytes: float
    twin: Mapping[str, Any] | None = None

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return self.layout.way.strategy

    @property
    def kind(self) -> tuple[str, str]:
        """(strategy, mesh as text); see :func:`kind_of_layout`."""
        return kind_of_layout(self.strategy, self.layout.sizes)

    @property
    def complexity(self) -> tuple[int, int]:
        """(number of strategies and memory switches, number of axes of several ranks)."""
        things = things_to_set(self.strategy, self.saving, self.training)
        return things, sum(n > 1 for n in self.layout.sizes.values())

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The choices besides the way: backend, samples of a micro-batch, and for experts the fold."""
        of_all = ("backend", self.training_text), ("micro-batch", str(self.layout.micro_batch))
        fold = self.layout.fold
        return of_all if fold is None else (*of_all, ("fold", str(fold)))

    def cell(self, asked: Cell) -> Cell:
        """The cell with this layout; ``asked`` is the question's cell."""
        layout, (batch, _) = self.layout, asked.shape
        training = {**asked.training.model_dump(exclude_defaults=True), **self.training}
        if asked.training.step == "training":
            training["micro_batches"] = batch // (layout.dp * layout.micro_batch)
        if layout.virtual_stages > 1:
            training |= {"schedule": "interleaved", "virtual_stages": layout.virtual_stages}
        if layout.stage_layers:
            training["stage_layers"] = [*layout.stage_layers]
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


class Bar:
    """The estimated seconds above which layouts are no candidates, from the layouts enumerated so far.

    Attributes:
        far: the least estimated seconds of layouts that are no candidates, by (way, dp, pp).
    """

    def __init__(self) -> None:
        self.far: dict[tuple[Way, int, int], float] = {}
        self._best: dict[tuple[Way, int, int], float] = {}
        self.most_s = math.inf

    def add(self, layout: Layout, seconds: float) -> None:
        """Record the estimated seconds of a layout that probably fits."""
        kind = (layout.way, layout.dp, layout.pp)
        if seconds < self._best.get(kind, math.inf):
            self._best[kind] = seconds
            shortest = heapq.nsmallest(_NAMED, self._best.values())
            self.most_s = _FAR * shortest[-1] if len(shortest) == _NAMED else math.inf

    def passes(self, layout: Layout, seconds: float) -> bool:
        """Whether a layout that takes at least ``seconds`` may be a candidate; records those that may not."""
        if seconds <= self.most_s:
            return True
        kind = (layout.way, layout.dp, layout.pp)
        self.far[kind] = min(seconds, self.far.get(kind, math.inf))
        return False


class Candidates:
    """The candidates of a question: each layout with every backend and saving that has figures, except those
    that take longer by the estimate than the same layout and backend with another saving that surely fits (or
    with states on the cards, not the host), and those with more settings that are no faster.

    Args:
        savings: settings of the model by their text.
        refused: takes the reasons of impossible layouts.
        usable: bytes of a card that tensors can have; 0: nothing surely fits.
        left_out: counts the exceptions, by :data:`SLOWER`, :data:`TOO_SLOW` and :data:`TOO_LARGE`.
        bar: leaves out layouts that take far longer than others; None: a new bar.
    """

    def __init__(
        self,
        question: Question,
        estimates: Estimates,
        savings: Mapping[str, Mapping[str, Any]],
        refused: Refused,
        usable: float = 0.0,
        left_out: Counter[str] | None = None,
        bar: Bar | None = None,
    ):
        self.question, self.estimates, self.refused, self.usable = question, estimates, refused, usable
        self.left_out, self.bar = Counter[str]() if left_out is None else left_out, bar or Bar()
        settings_by_text = {as_text(each): each for each in backend_settings(question)}
        #: settings of backends and of the model, both as they are and as text
        self.backends = [settings_by_text[text] for text in estimates.backends]
        self.settings = [savings[text] for text in estimates.references]
        self.texts = [*estimates.backends], [*estimates.references]
        #: whether each backend has stages, [backends, 1], and the index of its twin
        stages = [bool(each) and has_stages(question, each) for each in self.backends]
        self.pipelined = np.array(stages)[:, None]
        self.twins = twins_of(self.backends, [each.host_bytes > 0 for each in estimates.backends.values()])

    def __iter__(self) -> Iterator[Candidate]:
        for way in ways(self.question):
            figures_and_options = figures_of(self.estimates, way, self.question, self.refused)
            if figures_and_options is None:
                continue
            for unfolded_layout in layouts(self.question, way, self.estimates.layers, self.refused):
                every = folded(self.question, unfolded_layout)
                if every:
                    yield from self._of_layouts(every, *figures_and_options)

    def _of_layouts(
        self, every: Sequence[Layout], figures: WayFigures, options: Mapping[str, Any]
    ) -> Iterator[Candidate]:
        """The candidates of layouts that differ only in their folds, the ranks of their experts."""
        estimates, usable, bar, left_out = self.estimates, self.usable, self.bar, self.left_out
        backends, settings = self.backends, self.settings
        computing = estimates.computing(every, figures)
        passing = [bar.passes(each, least) for each, least in zip(every, computing.min(axis=1), strict=True)]
        near = [each for each, passes in zip(every, passing, strict=True) if passes]
        far, yielded = (len(every) - len(near)) * len(backends) * len(settings), 0
        if not near:
            left_out[TOO_SLOW] += far
            return
        times_of = estimates.times(near, figures, computing[passing])
        activations = estimates.activations(near, figures)
        memories_of = estimates.states(near, figures)[..., None] + activations[:, None]
        folds, pipelined = best_folds(times_of, memories_of, usable), self.pipelined
        may = pipelined if near[0].pp > 1 else np.ones_like(pipelined)
        probably = np.where(may & (memories_of * _MAY_FIT <= usable), times_of, np.inf)
        bar.add(near[0], probably.min(initial=np.inf))
        within = times_of <= bar.most_s
        asked = may & within & folds
        large = asked & (memories_of > FAR_TOO_LARGE * (usable or np.inf))
        if large.any() and (large == asked).all():  # keep the smallest, to say what would fit
            large &= memories_of > memories_of[large].min()
        left = undominated(times_of, memories_of, asked & ~large)
        for layout, times, memories, own, kept_of in zip(
            near, times_of, memories_of, activations, left, strict=True
        ):
            fitting = np.where(memories * SURELY <= usable, times, np.inf)
            shortest = fitting.min(axis=1, initial=np.inf)
            for row in np.flatnonzero(kept_of.any(axis=1)).tolist():
                twin = None if (other := self.twins[row]) is None else backends[other]
                of_twin = np.inf if other is None else shortest[other]
                kept = np.flatnonzero(promising(times[row], fitting[row], of_twin) & kept_of[row])
                for at in kept.tolist():
                    seconds, nbytes = float(times[row, at]), float(memories[row, at])
                    chosen = backends[row], settings[at], self.texts[0][row], self.texts[1][at]
                    yield Candidate(layout, options, *chosen, seconds, nbytes, float(own[at]), twin)
                yielded += len(kept)
        left_out[TOO_SLOW] += far + int((may & ~within).sum())
        left_out[TOO_LARGE] += int(large.sum())
        left_out[SLOWER] += int((may & within & ~large).sum()) - yielded


def undominated(times: np.ndarray, memories: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Which of the candidates marked in ``asked`` take hardly longer than the fastest candidate that needs no
    more bytes; all arrays have one shape."""
    places = np.flatnonzero(asked)
    taken, nbytes = times.ravel()[places], memories.ravel()[places]
    order = np.lexsort((taken, nbytes))
    near = taken[order] <= _DOMINATED * np.minimum.accumulate(taken[order])
    kept = np.zeros(asked.size, dtype=bool)
    kept[places[order[near]]] = True
    return kept.reshape(asked.shape)


def best_folds(times: np.ndarray, memories: np.ndarray, usable: float) -> np.ndarray:
    """Which folds may be the best, bool [folds, backends, settings]: for each backend and settings the
    fastest fold that probably fits, and the fastest fold that may fit; if none may fit, the smallest fold.

    Args:
        times, memories: seconds and bytes, [folds, backends, settings].
        usable: bytes of a card; 0: anything fits.
    """
    kept = np.zeros(times.shape, dtype=bool)
    if len(kept) == 1:
        return ~kept
    smallest = memories.min(axis=0)
    for most in (usable / _MAY_FIT, usable * _MAY_FIT) if usable else (np.inf,):
        within = np.where(memories <= np.maximum(most, smallest), times, np.inf)
        np.put_along_axis(kept, within.argmin(axis=0)[None], True, axis=0)
    return kept


def promising(times: np.ndarray, fitting: np.ndarray, of_twin: float) -> np.ndarray:
    """Which settings may be the best, bool [settings], the simplest first: none that takes longer than
    another that surely fits; and of settings about as fast as the shortest of these only the simplest.

    Args:
        fitting: the seconds of settings that surely fit; infinite for others.
        of_twin: the shortest seconds of the twin (states on the card) that surely fits.
    """
    shortest = fitting.min(initial=np.inf)
    kept: np.ndarray = times <= min(shortest, of_twin)
    if shortest <= of_twin and shortest < np.inf:
        simplest = int(np.argmax(fitting <= shortest * _SAME))
        kept[simplest + 1 :] &= times[simplest + 1 :] * _SAME < fitting[simplest]
        kept[simplest] = True
    return kept


def figures_of(
    estimates: Estimates, way: Way, question: Question, refused: Refused
) -> tuple[WayFigures, Mapping[str, Any]] | None:
    """(figures of a way, the first options of its strategy that can run it); None: no options can."""
    reason = ""
    for options in settings_of(question, way.strategy):
        try:
            return estimates.figures(way, options), options
        except Unsupported as refusal:
            reason = str(refusal)
    refused.setdefault(str(way), reason)
    return None
