"""The search: layouts in the order of their estimates, the promising ones traced with few layers, the best of
these with all.

What a trace of few layers finds also says how far estimates of layouts of the same strategy are off, and the
order is mended by it. The search ends where no layout is left whose estimate, off as far to the good side as
any of its strategy was, would be among the best.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from spbench.bench.advise.looks import Depth, Look
from spbench.bench.advise.question import Question
from spbench.bench.advise.references import as_text, references, savings_of
from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.config.changes import changed
from spbench.bench.errors import UserError
from spbench.bench.fit.answers import Answers
from spbench.bench.measurement import Outcome
from spbench.impls.layout import Unsupported

#: layouts that are traced with few layers at once, a worker
_AT_ONCE = 4
#: so many of the best are wanted, and traced whole
BEST = 5
#: an estimate may be off by this much more than any of its strategy so far, and of the same ranks along axes
_MARGIN, _MARGIN_OF_WAY = 1.1, 1.02
#: so many layouts are traced with few layers at the most
_MOST_LOOKS = 120
#: until a layout of a strategy was traced, its estimates may be too high, or too low, by so much
_UNKNOWN = 1.6
#: of the estimated memory, from which a layout is not traced
_TOO_LARGE = 1.25
#: a strategy that is so much slower than the best is not looked at more closely
_FAR = 2.5


@dataclass(frozen=True)
class Candidate:
    """A layout with a backend and settings of the model.

    Attributes:
        estimated_s, estimated_bytes: of a step, and of the fullest rank.
        options: of the strategy.
        training: backend and its options.
        saving: of the model, as text.
    """

    layout: Layout
    options: Mapping[str, Any]
    training: Mapping[str, Any]
    saving: str
    estimated_s: float
    estimated_bytes: float

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.layout.way.strategy


@dataclass
class Seen:
    """A cell that was traced.

    Attributes:
        outcome: of the closest look so far.
        depth: of it.
    """

    cell: Cell
    outcome: Outcome
    depth: Depth
    estimated_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits its card."""
        return self.outcome.status == "ok"

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        seconds: float = self.outcome.measurement["step_time_s"]
        return seconds

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank at its peak."""
        nbytes: int = self.outcome.measurement["peak_memory_bytes"]
        return nbytes


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: that fit, traced whole, the fastest first; of each strategy and mesh one.
        of_strategies: the best of each strategy that fits, the fastest first.
        nearest: where nothing fits, what needs least; None: something fits, or nothing could be traced.
        counts: what became of how many layouts.
        refused: why which layouts cannot be.
        traced: every look.
    """

    best: list[Seen] = field(default_factory=list)
    of_strategies: list[Seen] = field(default_factory=list)
    nearest: Seen | None = None
    counts: Counter[str] = field(default_factory=Counter)
    refused: Refused = field(default_factory=Refused)
    traced: list[Seen] = field(default_factory=list)


class Search:
    """The search for one question; see the module.

    Args:
        answers: whose run is :func:`look`.
        say: told what is done.
    """

    def __init__(self, question: Question, answers: Answers, say: Callable[[str], None] = lambda text: None):
        self.question, self.answers, self.say = question, answers, say
        self.usable = load_cluster(question.cell.cluster).usable_memory_bytes or float("inf")
        self.savings = savings_of(question)
        self.backends = {as_text(each): each for each in backend_settings(question)}
        self.found = Found()
        self.seen: dict[str, Seen] = {}
        #: traced over estimated: seconds of each strategy and way; bytes of each strategy, way and backend
        self.slower: dict[str, list[float]] = defaultdict(list)
        self.larger: dict[str, list[float]] = defaultdict(list)

    def run(self) -> Found:
        """Search.

        Raises:
            UserError: no layout is possible.
        """
        self.say("small traces of the model and of the backends")
        estimates = Estimates(
            self.question.cell,
            self.question.gpus,
            *references(self.question, self.answers, self.savings),
        )
        candidates = self._candidates(estimates)
        if not candidates:
            reasons = Counter(self.found.refused.reasons.values()).most_common(1)
            why = f": {reasons[0][0]}" if reasons else "; see --only, --without and --fixed"
            raise UserError(f"no layout of {self.question.gpus} GPUs is possible{why}")
        waiting = self._small_enough(candidates)
        self.say(f"{len(candidates)} layouts, of which {len(waiting)} may fit")
        self._few_layers(waiting)
        self._whole()
        self._conclude(candidates, waiting)
        return self.found

    # -- candidates ------------------------------------------------------------------------------------

    def _candidates(self, estimates: Estimates) -> list[Candidate]:
        found: list[Candidate] = []
        for way in ways(self.question):
            figures, options = self._figures(estimates, way)
            if figures is None:
                continue
            for layout in layouts(self.question, way, estimates.layers, self.found.refused):
                for text in estimates.backends:
                    training = self.backends.get(text, {})
                    if layout.pp > 1 and not _pipelined(training):
                        continue
                    for saving in estimates.references:
                        found.append(
                            Candidate(
                                layout,
                                options,
                                training,
                                saving,
                                estimates.time(layout, figures, text, saving),
                                estimates.memory(layout, figures, text, saving),
                            )
                        )
        return found

    def _figures(self, estimates: Estimates, way: Way) -> tuple[WayFigures | None, Mapping[str, Any]]:
        """With the first of the strategy's settings that can be."""
        reason = ""
        for options in strategy_settings(way.strategy):
            try:
                return estimates.figures(way, options), options
            except Unsupported as refusal:
                reason = str(refusal)
        self.found.refused.add(str(way), reason)
        return None, {}

    def _small_enough(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose estimated memory may fit; if there are none, the smallest."""
        small = [c for c in candidates if c.estimated_bytes <= _TOO_LARGE * self.usable]
        return small or sorted(candidates, key=lambda c: c.estimated_bytes)[: 2 * BEST]

    def cell(self, candidate: Candidate) -> Cell:
        """The cell of a candidate."""
        layout, asked = candidate.layout, self.question.cell
        batch, _ = asked.shape
        training = {
            **asked.training.model_dump(exclude_defaults=True),
            **candidate.training,
            "micro_batches": batch // (layout.dp * layout.micro_batch),
        }
        if asked.training.step == "inference":
            training.pop("micro_batches")
        if layout.virtual_stages > 1:
            training |= {"schedule": "interleaved", "virtual_stages": layout.virtual_stages}
        return asked.model_copy(
            update={
                "strategy": candidate.strategy,
                "strategy_options": dict(candidate.options),
                "sizes": Sizes(**layout.sizes),
                "model_options": {**asked.model_options, **self.savings[candidate.saving]},
                "training": TrainingOptions.model_validate(training),
            }
        )

    # -- few layers ------------------------------------------------------------------------------------

    def _few_layers(self, waiting: list[Candidate]) -> None:
        """Trace candidates with few layers until none is left that could be among the best."""
        while batch := self._next(waiting):
            for candidate in batch:
                waiting.remove(candidate)
            self._look({id(c): c for c in batch})
            fitting = self.fitting()
            if fitting:
                best = fitting[0]
                self.say(
                    f"{len(self.seen)} layouts traced with few layers; the best: {best.step_s:.3g} s, "
                    f"{best.cell.strategy} {best.cell.mesh_text}"
                )

    def _next(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        """The most promising of those that could be among the best, of each way one at a time; of a strategy
        that was not traced yet, one."""
        best = self._best_of(lambda cell: (cell.strategy, cell.mesh_text))
        bar = best[0].step_s if len(best) >= BEST else float("inf")
        far = _FAR * best[0].step_s if best else float("inf")
        chosen: list[Candidate] = []
        begun: set[str] = set()
        for candidate in sorted(waiting, key=self._expected_s):
            name, way = candidate.strategy, str(candidate.layout.way)
            if len(chosen) >= min(_AT_ONCE * self.answers.jobs, _MOST_LOOKS - len(self.seen)):
                break
            if way in begun or self._bytes(candidate) > self.usable:
                continue
            if name not in self.slower:
                if name in begun or candidate.estimated_s / _UNKNOWN > far:
                    continue
            elif self._least_s(candidate) > bar:
                continue
            begun |= {name, way} if name not in self.slower else {way}
            chosen.append(candidate)
        return chosen

    def _expected_s(self, candidate: Candidate) -> float:
        name, way = candidate.strategy, str(candidate.layout.way)
        return candidate.estimated_s * median(self.slower.get(way) or self.slower.get(name) or [1.0])

    def _least_s(self, candidate: Candidate) -> float:
        """Seconds that a candidate takes at the least, as far as is known."""
        if known := self.slower.get(str(candidate.layout.way)):
            return candidate.estimated_s * min(known) / _MARGIN_OF_WAY
        return candidate.estimated_s * min(self.slower[candidate.strategy]) / _MARGIN

    def _bytes(self, candidate: Candidate) -> float:
        """Bytes that a candidate takes at the least, as far as is known: by traces of the same way and
        backend, or else by the estimate."""
        if known := self.larger.get(_states(candidate)):
            return candidate.estimated_bytes * min(known) / _MARGIN
        return candidate.estimated_bytes * min([1.0, *self.larger[candidate.strategy]]) / _MARGIN

    def _look(self, chosen: Mapping[int, Candidate]) -> None:
        cells = {}
        for candidate in chosen.values():
            made = Look.at(self.cell(candidate), "few_layers")
            cells[made.key] = candidate, made
        for key, outcome in self._outcomes([made for _, made in cells.values()]):
            candidate, made = cells[key]
            if outcome.status in ("ok", "oom"):
                seen = Seen(made.cell, outcome, "few_layers", candidate.estimated_s)
                self.seen[made.cell.key] = seen
                for name in (candidate.strategy, str(candidate.layout.way)):
                    self.slower[name].append(seen.step_s / candidate.estimated_s)
                for name in (candidate.strategy, _states(candidate)):
                    self.larger[name].append(seen.peak / candidate.estimated_bytes)
            else:
                self.found.refused.add(f"{candidate.layout.way} {made.mesh_text}", outcome.reason)
                self.found.counts["cannot be run"] += 1

    def _outcomes(self, cells: Sequence[Cell]) -> Iterator[tuple[str, Outcome]]:
        for cell, outcome in self.answers(cells):
            if outcome.status in ("failed", "timeout"):
                raise RuntimeError(f"{cell.key}: {outcome.reason}\n{outcome.traceback}")
            yield cell.key, outcome

    def fitting(self) -> list[Seen]:
        """The cells that fit, the fastest first."""
        return sorted((s for s in self.seen.values() if s.fits), key=lambda s: s.step_s)

    # -- all layers ------------------------------------------------------------------------------------

    def _whole(self) -> None:
        """Trace the best with all layers, until the best :data:`BEST` are; and the best of each strategy that
        is near them."""
        self._polish()
        while True:
            best = self._best_of(lambda cell: (cell.strategy, cell.mesh_text))
            chosen = [s for s in best[:BEST] if s.depth != "all_layers"]
            if not chosen:
                break
            self._trace_whole(chosen)
        if not self.fitting():
            return
        near = [
            s for s in self._best_of(lambda cell: cell.strategy) if s.step_s < _FAR * self.fitting()[0].step_s
        ]
        self._trace_whole([s for s in near[:BEST] if s.depth != "all_layers"])

    def _trace_whole(self, chosen: Sequence[Seen]) -> None:
        if chosen:
            self.say(f"tracing {len(chosen)} of the best with all layers")
        cells = {made.key: made for s in chosen if (made := Look.at(s.cell, "all_layers"))}
        for key, outcome in self._outcomes([*cells.values()]):
            seen = self.seen[cells[key].cell.key]
            seen.outcome, seen.depth = outcome, "all_layers"

    def _polish(self) -> None:
        """Look at single changes of the best: other settings of its strategy, another order of the mesh, a
        part of the layers computed again."""
        fitting = self.fitting()
        if not fitting:
            return
        cells = {}
        for cell in (s.cell for s in fitting[:2]):
            for settings in self._changes(cell):
                try:
                    made = changed(cell, settings)
                except UserError:
                    continue
                if made.key not in self.seen:
                    cells[made.key] = Look.at(made, "few_layers")
        self.say(f"{len(cells)} single changes of the best")
        by_key = {each.key: each for each in cells.values()}
        for key, outcome in self._outcomes([*cells.values()]):
            if outcome.status in ("ok", "oom"):
                cell = by_key[key].cell
                self.seen[cell.key] = Seen(cell, outcome, "few_layers")

    def _changes(self, cell: Cell) -> Iterator[dict[str, Any]]:
        for options in strategy_settings(cell.strategy)[1:]:
            yield {f"strategy_options.{name}": value for name, value in options.items()}
        if cell.sizes.pp > 1 and cell.sizes.dp > 1:
            yield {"mesh": ["pp", "dp", "cp", "tp", "sp"]}
        if cell.sizes.cp > 1 and cell.sizes.sp > 1:
            yield {"mesh": ["dp", "pp", "sp", "tp", "cp"]}
        for saving in self._partial(cell):
            yield {f"model_options.{name}": value for name, value in saving.items()}

    def _partial(self, cell: Cell) -> Iterator[Mapping[str, Any]]:
        """Of a cell that saves memory, what saves less of it."""
        from spbench.impls.models.model import model_preset

        if cell.model_options != self.question.cell.model_options:
            model = model_preset(*self.question.cell.model_arguments)
            for each in model.savings(cell.sizes.pp * cell.training.virtual_stages):
                yield each.options

    # -- the end ---------------------------------------------------------------------------------------

    def _best_of(self, kind: Callable[[Cell], Hashable]) -> list[Seen]:
        """Of each kind of cells the fastest that fits, the fastest first."""
        best: dict[Hashable, Seen] = {}
        for seen in self.fitting():
            best.setdefault(kind(seen.cell), seen)
        return [*best.values()]

    def _conclude(self, candidates: Sequence[Candidate], waiting: Sequence[Candidate]) -> None:
        found, fitting = self.found, self.fitting()
        found.traced = [*self.seen.values()]
        whole = [s for s in fitting if s.depth == "all_layers"]
        found.best = [s for s in self._best_of(lambda cell: (cell.strategy, cell.mesh_text)) if s in whole]
        found.of_strategies = self._best_of(lambda cell: cell.strategy)
        if not fitting and self.seen:
            found.nearest = min(self.seen.values(), key=lambda s: s.peak)
        too_large = sum(c.estimated_bytes > _TOO_LARGE * self.usable for c in candidates)
        found.counts |= Counter(
            {
                "cannot be": len(found.refused.reasons),
                "need too much by the estimate": too_large,
                "too slow by the estimate, or too large after traces of their strategy": len(waiting),
                "traced with few layers": len(self.seen),
                "of these with all layers": sum(s.depth == "all_layers" for s in found.traced),
                "looked at": len(candidates) + len(found.refused.reasons),
            }
        )


def _states(candidate: Candidate) -> str:
    """What layouts have in common whose states of training are divided alike."""
    return f"{candidate.layout.way} {as_text(candidate.training)}"


def _pipelined(training: Mapping[str, Any]) -> bool:
    from spbench.impls.registries import backend_class

    return backend_class(training["backend"]).pipelined if "backend" in training else True
