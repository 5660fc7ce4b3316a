"""The search: layouts in the order of their estimates, the promising ones traced with few layers, the best
of these with all.

What a trace of few layers finds also says how far the estimates of its strategy on these axes, of its backend
and of its micro-batches are off, and the order is mended by it. The search ends where no layout is left that
would be faster than the fifth best even if it took as little time as :meth:`Learned.bounds` says, or where
many traces in a row have gained the best nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.tools.choose.asking import Asking, Say, unheard
from spbench.bench.tools.choose.candidates import (
    FAR_TOO_LARGE,
    SLOWER,
    TOO_LARGE,
    TOO_SLOW,
    Bar,
    Candidate,
    candidates,
    mesh_alone,
)
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.layouts import Way, things_to_set
from spbench.bench.tools.choose.learned import UNKNOWN, Learned
from spbench.bench.tools.choose.possible import why_impossible
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import (
    NAMED,
    SAME_STEP,
    LookedAt,
    SearchResult,
    Seen,
    complexity,
    has_experts,
    ranked,
    tie_limit,
)
from spbench.bench.tools.choose.references import references, savings_of
from spbench.bench.tools.choose.whole_looks import WholeLooks, changes_beside, cheaper_savings

#: layouts that are traced with few layers at once, a worker
_AT_ONCE = 3
#: so many of the best are wanted
BEST = NAMED
#: after so many traces of few layers, of strategies that were traced before, by which the best together were
#: not faster by so much, none is awaited
_PATIENCE, _GAIN = 9, 1.02
#: of so many stages a trace takes several times as long, and counts as so many
_DEEP, _COUNTS = 8, 3
#: from which share of a search's time to which its parts are, roughly: small traces, traces of few layers,
#: also beside the best, of which there are some so many, and traces of all layers
_BEHIND = {"small": (0.08, 0.15), "few": (0.15, 0.4), "all": (0.4, 1.0)}
_BESIDE = 6
#: a layout whose estimated memory is so much less probably fits
_ROOM = 1.1
#: rounds of traces, each of as many as there are workers, of simpler layouts
_SIMPLER = 4


class Search(LookedAt):
    """The search for one question; see the module.

    Args:
        asking: traces layouts.
        say: takes what is done.

    Attributes:
        every: the candidates, once there are some.
    """

    def __init__(self, question: Question, asking: Asking, say: Say = unheard):
        super().__init__(question, asking, say)
        #: a layout that takes more than :attr:`most_bytes` is not traced; above these estimated bytes none is
        self.too_large = FAR_TOO_LARGE * self.usable
        self.every, self.bar, self.learned = list[Candidate](), Bar(), Learned(())
        #: by layout, the places of its candidates, the fastest by the estimate first
        self._of_layouts: dict[int, list[int]] = defaultdict(list)
        self._roomy = set[str]()  # strategies of which a layout will probably fit
        self.whole = WholeLooks(self)

    def run(self) -> SearchResult:
        """Search.

        Raises:
            UserError: no layout is possible.
        """
        if reason := why_impossible(self.question):
            raise UserError(reason)
        self._enumerate()
        waiting = [c for c in self.every if c.estimated_bytes <= self.too_large]
        if not waiting:  # the nearest that would fit is asked for
            waiting = sorted(self.every, key=lambda c: c.estimated_bytes)[: 2 * BEST]
            self.most_bytes = float("inf")
        self.behind.begin(f"{len(self.every)} layouts, of which {len(waiting)} may fit", *_BEHIND["few"])
        (counts := self.result.counts)[TOO_LARGE] += len(self.every) - len(waiting)
        if own := self.question.own:  # it may be the best too
            self.result.own = next(iter(self.looked_at([own.looked_at], "all_layers")), None)
        self._roomy = {c.strategy for c in waiting if c.estimated_bytes * _ROOM <= self.most_bytes}
        for at in sorted(range(len(waiting)), key=lambda at: waiting[at].estimated_s):
            self._of_layouts[id(waiting[at].layout)].append(at)
        self.learned = Learned(waiting)
        self._few_layers()
        if self.most_bytes < self.usable and not self.fitting():  # also those that hardly do
            self.most_bytes = self.usable
            self._few_layers()
        self._simpler()
        counts[TOO_SLOW] += len(self.learned)
        self._polish()
        self.behind.begin("the best with all layers", *_BEHIND["all"])
        self.whole.run()
        while self.seen and not self.fitting() and not (near := min(self.seen.values(), key=_peak)).exact:
            self.looked_at([near.cell], "all_layers")  # what few layers say it needs may be too much
            self.whole.run()
        self._conclude()
        return self.result

    def _enumerate(self) -> None:
        """Make all candidates, with their estimates by small traces.

        Raises:
            UserError: none can be traced.
        """
        self.behind.begin("small traces of the model and of the backends", *_BEHIND["small"])
        question, counts, refused = self.question, self.result.counts, self.result.refused
        savings = savings_of(question)
        estimates = Estimates(
            question.cell, question.gpus, *references(question, self.asking, savings, self.behind.ended)
        )
        every = candidates(question, estimates, savings, refused, self.usable, counts, bar=self.bar)
        self.every = [*every]
        if not self.every:
            reasons = ", or ".join(dict.fromkeys(refused.reasons.values()))
            reason = reasons or "no backend or setting can be traced"
            raise UserError(f"no layout of {question.gpus} GPUs can be traced: {reason}")
        counts["cannot be"] = len(refused.reasons)
        others = sum(counts[each] for each in (SLOWER, TOO_SLOW, TOO_LARGE))
        counts["looked at"] = len(self.every) + others + len(refused.reasons)

    # -- few layers ------------------------------------------------------------------------------------

    def _few_layers(self) -> None:
        """Trace candidates with few layers until none is left that could be among the best."""
        best_s, patience = float("inf"), _PATIENCE
        # layouts with experts take long to trace: traces of all parts of a strategy tell of it too
        told = self.learned.knows_parts if has_experts(self.question.cell) else self.learned.knows
        while patience > 0 and (batch := self._next()):
            again = sum(
                _COUNTS if each.layout.pp >= _DEEP else 1 for each in batch.values() if told(each.strategy)
            )
            self._look(batch)
            if self.same.replaced:  # leave out candidates whose steps are those of another strategy
                others = self.learned.leave_out(lambda strategy: self.same.instead(strategy) != strategy)
                self.result.counts[SAME_STEP] += others
            if best := self.best_layouts():
                patience -= again
                sum_s = sum(seen.step_s for seen in best[:BEST])
                if len(best) < BEST or sum_s * _GAIN < best_s:
                    best_s, patience = sum_s, _PATIENCE
                self.behind.expect(
                    f"{len(self.seen)} layouts traced with few layers; the best: {best[0].step_s:.3g} s, "
                    f"{best[0]}",
                    max(patience, 0) + _BESIDE,
                )

    def _next(self) -> dict[int, Candidate]:
        """Choose, by place, the candidates to trace next: the most promising that may be among the best, at
        most one for each way and each new strategy."""
        best, learned = self.best_layouts(), self.learned
        bar = best[BEST - 1].step_s if len(best) >= BEST else float("inf")
        of_kind = {(seen.cell.strategy, mesh_alone(seen.cell)): seen.step_s for seen in best}
        bounds = learned.bounds()
        expected_s, least_s = bounds.expected_s, bounds.least_s
        places = np.flatnonzero(learned.left & (least_s <= bar) & (bounds.least_bytes <= self.most_bytes))
        chosen: dict[int, Candidate] = {}
        begun: set[str | Way] = set()
        for at in places[np.argsort(expected_s[places], kind="stable")].tolist():
            candidate = learned.candidates[at]
            name, way = candidate.strategy, candidate.layout.way
            soonest_s = min(expected_s[[*chosen]], default=float("inf"))
            if len(chosen) >= _AT_ONCE * max(2, self.asking.jobs) or expected_s[at] > UNKNOWN * soonest_s:
                break  # what takes so much longer has time until these are traced
            if name in begun or way in begun or least_s[at] > of_kind.get(candidate.kind, bar):
                continue
            if self._outdone(at, bounds.most_bytes):
                continue
            if not learned.knows(name):
                # the first of a strategy tells how long its steps are only where one like it may fit
                if name in self._roomy and candidate.estimated_bytes * _ROOM > self.most_bytes:
                    continue
                if begun & (parts := learned.unsettled_parts(name)):
                    continue  # what one of them shows of the part tells of the others
                begun |= {name, *parts}
            begun.add(way)
            chosen[at] = candidate
        learned.take(chosen)
        return chosen

    def _simpler(self) -> None:
        """Look at layouts that by their estimates tie with the fastest, and are simpler than the one that
        would be named first, or as simple and of a strategy that was not traced."""
        learned = self.learned
        for _ in range(_SIMPLER if self.fitting() else 0):
            best = self.best_layouts()
            (things, *axes), most_s = complexity(ranked(best)[0].cell)[:2], tie_limit(best) * best[0].step_s
            named = things - things_to_set("single", self.question.cell.model_options, {}), *axes
            places = learned.simpler(named, learned.bounds(), most_s, self.most_bytes)
            chosen = {at: learned.candidates[at] for at in islice(places, self.asking.jobs)}
            learned.take(chosen)
            self._look(chosen)

    def _outdone(self, at: int, most_bytes: np.ndarray) -> bool:
        """Whether the same layout, with other settings of the model or with its states on the cards, takes
        no longer by the estimate and surely fits.

        Args:
            most_bytes: of each candidate.
        """
        candidate = self.learned.candidates[at]
        for other in self._of_layouts[id(candidate.layout)]:
            if other == at:
                return False  # the next ones take longer
            alike = self.learned.candidates[other].training in (candidate.training, candidate.twin)
            if alike and most_bytes[other] <= self.usable:
                return True
        return False

    def _look(self, chosen: Mapping[int, Candidate]) -> None:
        cells = {at: candidate.cell(self.question.cell) for at, candidate in chosen.items()}
        place_of = {cell.key: at for at, cell in cells.items()}
        for seen in self.looked_at([*cells.values()], "few_layers"):
            at = place_of[seen.cell.key]
            self.learned.add(at, seen.step_s, seen.peak)
            self.same.add(chosen[at], seen.step_s, seen.peak)

    # -- beside the best -----------------------------------------------------------------------------

    def _polish(self) -> None:
        """Look at single changes of the best."""
        if not (fitting := self.fitting()):
            return
        changes = changes_beside(self.question, best := fitting[0].cell)
        self.behind.expect(f"{len(changes)} single changes of the best", len(changes))
        self._changes_looked_at(changes)
        waiting = cheaper_savings(self.question, best)
        while waiting:
            begun = waiting[: self.asking.jobs]
            self._changes_looked_at(begun)
            if any((seen := self.seen.get(cell.key)) and seen.fits for cell in begun):
                break  # the next ones save more memory, and take longer
            waiting = waiting[len(begun) :]

    def _changes_looked_at(self, changes: Sequence[Cell]) -> None:
        cells = [cell for cell in changes if cell.key not in self.seen]
        self.result.counts["looked at"] += len(cells)
        self.looked_at(cells, "few_layers")

    # -- the end ---------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        result, fitting = self.result, self.fitting()
        result.traced, result.same = [*self.seen.values()], self.same.replaced
        result.best = self.best_layouts()
        result.of_strategies = self.best_strategies()
        if not fitting and self.seen:
            result.nearest = min(self.seen.values(), key=_peak)
        result.counts["traced with few layers"] = len(self.seen)
        result.counts["of these with all layers"] = sum(s.depth == "all_layers" for s in result.traced)


def _peak(seen: Seen) -> int:
    return seen.peak
