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
from spbench.bench.tools.choose.references import as_text, families_of, has_stages
from spbench.impls import MESH_AXES, Unsupported, spelled

#: a layout surely fits if a card has this many times its estimated bytes
SURELY = 2.0
#: a layout probably fits if its estimated bytes times this fit a card, and may fit if they do divided by this
_MAY_FIT = 1.25
#: each option of the model that saves memory must make a step faster by this factor, by the estimate
_WORTH = 1.005
#: what became of layouts that take longer than with other settings that need no more, or surely fit
SLOWER = "slower than with other settings that need no more or surely fit"
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
        family: a number that backends share which differ only in what they hold on hosts.
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
    family: int = 0

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
    that take longer than with other settings which surely fit, or which need no more (:func:`undominated`).

    Args:
        savings: settings of the model by their text.
        refused: takes the reasons of impossible layouts.
        usable: bytes of a card that tensors can have; 0: nothing surely fits.
        left_out: counts all others, by :data:`SLOWER`, :data:`TOO_SLOW` and :data:`TOO_LARGE`.
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
        #: whether each backend has stages, [backends, 1], and the number of its family
        stages = [bool(each) and has_stages(question, each) for each in self.backends]
        on_host = [each.host_bytes > 0 for each in estimates.backends.values()]
        self.pipelined = np.array(stages)[:, None]
        self.families = np.array(families_of(self.backends, on_host))
        self.worth = np.array([_WORTH ** len(each) for each in self.settings])

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
        computing = estimates.computing(every, figures)
        passing = [bar.passes(each, least) for each, least in zip(every, computing.min(axis=1), strict=True)]
        near = [each for each, passes in zip(every, passing, strict=True) if passes]
        left_out[TOO_SLOW] += (len(every) - len(near)) * len(self.backends) * len(self.settings)
        if not near:
            return
        times = estimates.times(near, figures, computing[passing])
        activations = estimates.activations(near, figures)
        memories = estimates.states(near, figures)[..., None] + activations[:, None]
        may = self.pipelined if near[0].pp > 1 else np.ones_like(self.pipelined)
        probably = np.where(may & (memories * _MAY_FIT <= usable), times, np.inf)
        bar.add(near[0], probably.min(initial=np.inf))
        asked = may & (times <= bar.most_s)
        large = asked & (memories > FAR_TOO_LARGE * (usable or np.inf))
        if large.any() and (large == asked).all():  # keep the smallest, to say what would fit
            large &= memories > memories[large].min()
        left = asked & ~large
        surely = left & (memories * SURELY <= usable)
        kept = undominated(times, memories, left & promising(times * self.worth, surely, self.families))
        for fold, row, at in np.argwhere(kept).tolist():
            chosen = self.backends[row], self.settings[at], self.texts[0][row], self.texts[1][at]
            seconds, nbytes = float(times[fold, row, at]), float(memories[fold, row, at])
            own, family = float(activations[fold, at]), int(self.families[row])
            yield Candidate(near[fold], options, *chosen, seconds, nbytes, own, family)
        left_out[TOO_SLOW] += int((may & (times > bar.most_s)).sum())
        left_out[TOO_LARGE] += int(large.sum())
        left_out[SLOWER] += int(left.sum()) - int(kept.sum())


def promising(times: np.ndarray, fitting: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Which candidates, [folds, backends, settings], take no longer than any of their backend's family that
    surely fits.

    Args:
        fitting: which candidates surely fit.
        families: the number of each backend's family.
    """
    shortest = np.full(len(families), np.inf)
    np.minimum.at(shortest, families, np.where(fitting, times, np.inf).min(axis=(0, 2)))
    kept: np.ndarray = times <= shortest[families][:, None]
    return kept


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
