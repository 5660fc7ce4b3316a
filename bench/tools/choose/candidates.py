"""The candidates of a search, with their estimates."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

#: a layout whose estimated bytes are so much less than a card has surely fits
SURELY = 2.0
#: a layout whose estimated bytes are so much less than a card has probably fits, and so much more, may fit
_MAY_FIT = 1.25
#: each setting that saves memory must make a step faster by so much, or is left out where there is memory
_SAME = 1.005
#: what became of layouts that take longer than another that surely fits
SLOWER = "slower than with other settings that surely fit"
#: what became of those that were not traced, or not even made candidates
TOO_SLOW = "too slow by the estimate, or too large after traces of their strategy"
#: and of those that are no candidates as others of the same ranks take so much less
TOO_LARGE = "need too much by the estimate"
#: a layout whose estimated memory is so much more than a card has is not traced
FAR_TOO_LARGE = 1.25
#: so many kinds of layouts are to be named; what takes so much longer by the estimate than that many that
#: probably fit is left out at once
_NAMED, _FAR = 5, 1.6
#: of one layout what takes so much longer by the estimate than what needs no more bytes is left out
_DOMINATED = 1.1


def ordered(sizes: Mapping[str, int], order: Sequence[str] = ORDER) -> list[str] | None:
    """The axes of several ranks in that order; None: as they are by default."""
    axes = [axis for axis in order if sizes.get(axis, 1) > 1]
    return None if axes == sorted(axes, key=MESH_AXES.index) else axes


def mesh_alone(cell: Cell) -> str:
    """The mesh of a cell as text, without the ranks of its experts and whatever the order of its axes."""
    return _mesh_alone(cell.mesh_sizes)


def _mesh_alone(sizes: Mapping[str, int]) -> str:
    return spelled({axis: sizes[axis] for axis in ORDER if axis in sizes})


def kind_of_layout(layout: Layout) -> tuple[str, str]:
    """Strategy and mesh, as of a cell (:func:`mesh_alone`)."""
    return layout.way.strategy, _mesh_alone(layout.sizes)


@dataclass(frozen=True)
class Candidate:
    """A layout with a backend and settings of the model.

    Attributes:
        options: of the strategy.
        training: backend and its options.
        saving: settings of the model that take less memory.
        training_text, saving_text: the same as text.
        estimated_s, estimated_bytes: of a step, and of the fullest rank.
        twin: ``training`` without the host, where that only makes room; None: it has nothing there.
    """

    layout: Layout
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    saving: Mapping[str, Any]
    training_text: str
    saving_text: str
    estimated_s: float
    estimated_bytes: float
    twin: Mapping[str, Any] | None = None

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.layout.way.strategy

    @property
    def kind(self) -> tuple[str, str]:
        """Strategy and mesh, as of a cell (:func:`mesh_alone`): of each kind the best layout is named."""
        return kind_of_layout(self.layout)

    @property
    def complexity(self) -> tuple[int, int]:
        """How many strategies and memory switches the candidate has, and how many axes of several ranks."""
        things = things_to_set(self.strategy, self.saving, self.training)
        return things, sum(n > 1 for n in self.layout.sizes.values())

    def cell(self, asked: Cell) -> Cell:
        """The cell that it makes of the one that was asked about."""
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
    """The estimated seconds above which layouts are no candidates, as far as layouts were looked at.

    Attributes:
        far: by kind of those that are none, the least estimated seconds.
    """

    def __init__(self) -> None:
        self.far: dict[tuple[Way, int, int], float] = {}
        self._best: dict[tuple[Way, int, int], float] = {}
        self.most_s = math.inf

    def add(self, layout: Layout, seconds: float) -> None:
        """A layout that probably fits."""
        kind = (layout.way, layout.dp, layout.pp)
        if seconds < self._best.get(kind, math.inf):
            self._best[kind] = seconds
            shortest = heapq.nsmallest(_NAMED, self._best.values())
            self.most_s = _FAR * shortest[-1] if len(shortest) == _NAMED else math.inf

    def passes(self, layout: Layout, seconds: float) -> bool:
        """Whether a layout that takes at least that many seconds may be a candidate; else notes its kind."""
        if seconds <= self.most_s:
            return True
        kind = (layout.way, layout.dp, layout.pp)
        self.far[kind] = min(seconds, self.far.get(kind, math.inf))
        return False


def candidates(
    question: Question,
    estimates: Estimates,
    savings: Mapping[str, Mapping[str, Any]],
    refused: Refused,
    usable: float = 0.0,
    left_out: Counter[str] | None = None,
    bar: Bar | None = None,
) -> Iterator[Candidate]:
    """All layouts of a question, with every backend and saving that there is a figure of; but none that
    another one outdoes by the estimate; see :meth:`_Choices.kept`.

    Args:
        savings: settings of the model by their text.
        refused: takes what cannot be.
        usable: bytes of a card that tensors can have; 0: nothing surely fits.
        left_out: counts those that are outdone, as :data:`SLOWER`, and as :data:`TOO_SLOW`.
        bar: leaves out what takes far longer than others; None: nothing is far.
    """
    choices = _Choices(question, estimates, savings, usable, bar or Bar())
    for way in ways(question):
        if (figures_and_options := figures_of(estimates, way, question, refused)) is None:
            continue
        for unfolded_layout in layouts(question, way, estimates.layers, refused):
            if every := folded(question, unfolded_layout):
                yield from choices.of_layouts(every, *figures_and_options)
    if left_out is not None:
        left_out.update(choices.left_out)


class _Choices:
    """The backends and settings of the model that each layout can have.

    Attributes:
        left_out: how many layouts became no candidates, by why.
    """

    def __init__(
        self,
        question: Question,
        estimates: Estimates,
        savings: Mapping[str, Mapping[str, Any]],
        usable: float,
        bar: Bar,
    ):
        forward_only = question.cell.training.step == "inference"
        by_text = {"": {}} if forward_only else {as_text(each): each for each in backend_settings(question)}
        self.estimates, self.usable, self.bar, self.left_out = estimates, usable, bar, Counter[str]()
        self._backends = [by_text[text] for text in estimates.backends]
        on_host = [each.host_bytes > 0 for each in estimates.backends.values()]
        self._twins = twins_of(self._backends, on_host)
        self._rivals = [at if other is None else other for at, other in enumerate(self._twins)]
        pipelined = [bool(each) and has_stages(question, each) for each in self._backends]
        self._pipelined = np.array(pipelined, dtype=bool)[:, None]
        self._savings = [savings[text] for text in estimates.references]
        self._penalties = np.array([_SAME ** len(each) for each in self._savings])

    def of_layouts(
        self, every: Sequence[Layout], figures: WayFigures, options: Mapping[str, Any]
    ) -> Iterator[Candidate]:
        """The candidates of layouts that differ only in the ranks of their experts."""
        estimates, computing = self.estimates, self.estimates.computing(every, figures)
        passing = [
            self.bar.passes(each, least) for each, least in zip(every, computing.min(axis=1), strict=True)
        ]
        near = [each for each, passes in zip(every, passing, strict=True) if passes]
        of_each = len(self._backends) * len(self._savings)
        self.left_out[TOO_SLOW] += (len(every) - len(near)) * of_each
        if not near:
            return
        times = estimates.times(near, figures, computing[passing])
        memories = estimates.states(near, figures)[..., None] + estimates.activations(near, figures)[:, None]
        kept = self.kept(near, times, memories)
        texts = [*estimates.backends], [*estimates.references]
        for at, row, place in np.argwhere(kept).tolist():
            twin = None if (other := self._twins[row]) is None else self._backends[other]
            chosen = self._backends[row], self._savings[place], texts[0][row], texts[1][place]
            seconds, nbytes = (float(each[at, row, place]) for each in (times, memories))
            yield Candidate(near[at], options, *chosen, seconds, nbytes, twin)

    def kept(self, near: Sequence[Layout], times: np.ndarray, memories: np.ndarray) -> np.ndarray:
        """Which of these layouts become candidates, bool [layouts, backends, savings]; the others are
        counted. None does that takes longer than another of its backend that surely fits, nor that takes much
        longer than any that needs no more bytes.

        Args:
            times, memories: [layouts, backends, savings].
        """
        usable, may = self.usable, np.ones(times.shape, dtype=bool)
        if near[0].pp > 1:
            may &= self._pipelined
        fitting = np.where(may & (memories * _MAY_FIT <= usable), times, np.inf)
        self.bar.add(near[0], fitting.min(initial=np.inf))
        asked = may & (times <= self.bar.most_s)
        large = asked & (memories > FAR_TOO_LARGE * (usable or np.inf))
        if large.any() and (large == asked).all():  # the smallest says what would fit
            large &= memories > memories[large].min()
        longer, needed = times * self._penalties, np.maximum(memories, usable / SURELY)
        longer[~asked | large] = np.inf
        # of each backend the shortest that surely fits; with states on the host, also where they are on cards
        surely = np.where(memories * SURELY <= usable, longer, np.inf).min(axis=(0, 2), initial=np.inf)
        kept: np.ndarray = longer <= np.minimum(surely, surely[self._rivals])[:, None]
        kept &= undominated(longer.ravel(), needed.ravel(), _DOMINATED).reshape(times.shape)
        self.left_out[TOO_SLOW] += int((may & (times > self.bar.most_s)).sum())
        self.left_out[TOO_LARGE] += int(large.sum())
        self.left_out[SLOWER] += int((asked & ~large & ~kept).sum())
        return kept


def undominated(times: np.ndarray, memories: np.ndarray, slack: float) -> np.ndarray:
    """Which take at most ``slack`` times as long as each other one along the last axis that needs no more
    bytes; times of infinity are of none."""
    order = np.lexsort((times, memories), axis=-1)
    in_order = np.take_along_axis(times, order, axis=-1)
    near = (in_order <= slack * np.minimum.accumulate(in_order, axis=-1)) & np.isfinite(in_order)
    kept = np.zeros(times.shape, dtype=bool)
    np.put_along_axis(kept, order, near, axis=-1)
    return kept


def figures_of(
    estimates: Estimates, way: Way, question: Question, refused: Refused
) -> tuple[WayFigures, Mapping[str, Any]] | None:
    """With the first of the strategy's settings that can be; None: none can."""
    reason = ""
    for options in settings_of(question, way.strategy):
        try:
            return estimates.figures(way, options), options
        except Unsupported as refusal:
            reason = str(refusal)
    refused.add(str(way), reason)
    return None
