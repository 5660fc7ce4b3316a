"""The candidates of a search, with their estimates, and what traces have taught about these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spbench.bench.advise.estimates import Estimates, WayFigures
from spbench.bench.advise.layouts import (
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
from spbench.impls.layout import Unsupported
from spbench.impls.registries import backend_class

#: an estimate may be off by this much more than any of its strategy so far, and of the same ranks along axes
_MARGIN, _MARGIN_OF_WAY = 1.1, 1.02


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

    @property
    def way(self) -> str:
        """Strategy and ranks along its axes."""
        return str(self.layout.way)

    @property
    def states(self) -> str:
        """What layouts have in common whose states of training are divided alike."""
        return f"{self.way} {as_text(self.training)}"

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
) -> Iterator[Candidate]:
    """All layouts of a question, with every backend and saving that there is a figure of.

    Args:
        savings: settings of the model by their text.
        refused: takes what cannot be.
    """
    forward_only = question.cell.training.step == "inference"
    backends = {"": {}} if forward_only else {as_text(each): each for each in backend_settings(question)}
    for way in ways(question):
        made = _figures(estimates, way, refused)
        if made is None:
            continue
        figures, options = made
        for layout in layouts(question, way, estimates.layers, refused):
            for text in estimates.backends:
                training = backends[text]
                if layout.pp > 1 and not (training and backend_class(training["backend"]).pipelined):
                    continue
                for saving in estimates.references:
                    seconds = estimates.time(layout, figures, text, saving)
                    nbytes = estimates.memory(layout, figures, text, saving)
                    yield Candidate(layout, options, training, savings[saving], seconds, nbytes)


def _figures(estimates: Estimates, way: Way, refused: Refused) -> tuple[WayFigures, Mapping[str, Any]] | None:
    """With the first of the strategy's settings that can be; None: none can."""
    reason = ""
    for options in strategy_settings(way.strategy):
        try:
            return estimates.figures(way, options), options
        except Unsupported as refusal:
            reason = str(refusal)
    refused.add(str(way), reason)
    return None


@dataclass
class Learned:
    """How far estimates were off: traced over estimated.

    Attributes:
        slower: of seconds, by strategy and by way.
        larger: of bytes, by strategy, and by way and backend.
    """

    slower: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    larger: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def knows(self, strategy: str) -> bool:
        """Whether a layout of it was traced."""
        return strategy in self.slower

    def add(self, candidate: Candidate, seconds: float, nbytes: float) -> None:
        """What a trace of a candidate found."""
        for name in (candidate.strategy, candidate.way):
            self.slower[name].append(seconds / candidate.estimated_s)
        for name in (candidate.strategy, candidate.states):
            self.larger[name].append(nbytes / candidate.estimated_bytes)

    def expected_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate probably takes."""
        known = self.slower.get(candidate.way) or self.slower.get(candidate.strategy) or [1.0]
        return candidate.estimated_s * median(known)

    def least_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate of a known strategy takes at the least."""
        if known := self.slower.get(candidate.way):
            return candidate.estimated_s * min(known) / _MARGIN_OF_WAY
        return candidate.estimated_s * min(self.slower[candidate.strategy]) / _MARGIN

    def least_bytes(self, candidate: Candidate) -> float:
        """Bytes that a candidate takes at the least: by traces of the same way and backend, or else by the
        estimate."""
        if known := self.larger.get(candidate.states):
            return candidate.estimated_bytes * min(known) / _MARGIN
        return candidate.estimated_bytes * min([1.0, *self.larger.get(candidate.strategy, [])]) / _MARGIN
