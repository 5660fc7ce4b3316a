"""The search: layouts in the order of their estimates, the promising ones traced with few layers, the best
two of these with all.

What a trace of few layers finds also says how far the estimates of its strategy on these axes, of its backend
and of its micro-batches are off, and the order is mended by it. The search ends where no layout is left that
would be faster than the fifth best even if it took as little time as :meth:`Learned.least_s` says, or where
many traces in a row have gained the best nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import islice

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.advise.candidates import (
    FAR_TOO_LARGE,
    SLOWER,
    TOO_LARGE,
    TOO_SLOW,
    Bar,
    Candidate,
    candidates,
    mesh_alone,
)
from spbench.bench.tools.advise.estimates import Estimates
from spbench.bench.tools.advise.layouts import Way, folds_anew
from spbench.bench.tools.advise.learned import UNKNOWN, Learned, Waiting
from spbench.bench.tools.advise.look import Depth, looks
from spbench.bench.tools.advise.possible import why_impossible
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.ranking import (
    NAMED,
    SearchResult,
    Seen,
    best_of,
    complexity,
    has_experts,
    ranked,
    tie_limit,
)
from spbench.bench.tools.advise.references import references, savings_of
from spbench.bench.tools.advise.same_steps import SAME_STEP, SameSteps
from spbench.bench.tools.advise.single_changes import changes_beside, cheaper_savings
from spbench.bench.tools.advise.switch_prices import other_kernels
from spbench.bench.tools.advise.unfolded_layouts import unfolded_layouts
from spbench.bench.tools.fit.asking import Asking, Say, unheard

#: layouts that are traced with few layers at once, a worker
_AT_ONCE = 3
#: so many of the best are wanted, and so many of these traced whole, which takes several times as long
BEST, _WHOLE = NAMED, 2
#: after so many traces of few layers, of strategies that were traced before, by which the best together were
#: not faster by so much, none is awaited
_PATIENCE, _GAIN = 12, 1.02
#: of so many stages a trace takes several times as long, and counts as so many
_DEEP, _COUNTS = 8, 3
#: shares of a search's time that are behind, roughly, after small traces, traces of few layers, single
#: changes of the best, and traces of all layers
BEHIND = {"small": 0.1, "few": 0.6, "changes": 0.7, "all": 0.9}
#: a layout whose estimated memory is so much less probably fits
_ROOM = 1.1
#: rounds of traces, each of as many as there are workers, of layouts without folding, and of simpler ones
_UNFOLDED, _SIMPLER = 3, 4
#: of a model with experts, whose ranks along ep can be raised for little, a layout that takes a larger share
#: of a card by few layers counts as one that does not fit, as long as another one does
_FULL = 0.95


class Search:
    """The search for one question; see the module.

    Args:
        asking: traces layouts.
        say: takes what is done.

    Attributes:
        every: the candidates, once there are some.
    """

    def __init__(self, question: Question, asking: Asking, say: Say = unheard):
        self.question, self.asking, self.say = question, asking, say
        self.usable = load_cluster(question.cell.cluster).usable_memory_bytes or float("inf")
        #: a layout that takes more is not traced; above the other estimated bytes none is
        self.too_large = FAR_TOO_LARGE * self.usable
        self.most_bytes = self.usable * (_FULL if has_experts(question.cell) else 1.0)
        self.result, self.every = SearchResult(), list[Candidate]()
        self.bar = Bar()  # of candidates
        self.seen: dict[str, Seen] = {}
        #: by strategy, how much longer steps were by traces of all layers than by those of few
        self.longer: dict[str, list[float]] = {}
        self.learned, self.same = Learned(), SameSteps()
        #: by layout, its candidates, the fastest by the estimate first
        self._of_layouts: dict[int, list[Candidate]] = defaultdict(list)
        self._roomy = set[str]()  # strategies of which a layout will probably fit

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
        self.say(f"{len(self.every)} layouts, of which {len(waiting)} may fit", BEHIND["small"])
        (counts := self.result.counts)[TOO_LARGE] += len(self.every) - len(waiting)
        if own := self.question.own:  # it may be the best too
            self.result.own = next(iter(self._traced([own.looked_at], "all_layers")), None)
        self._roomy = {c.strategy for c in waiting if c.estimated_bytes * _ROOM <= self.most_bytes}
        for candidate in sorted(waiting, key=lambda each: each.estimated_s):
            self._of_layouts[id(candidate.layout)].append(candidate)
        left = Waiting(waiting)
        self._few_layers(left)
        if self.most_bytes < self.usable and not self.fitting():  # also those that hardly do
            self.most_bytes = self.usable
            self._few_layers(left)
        self._simpler(left)
        counts[TOO_SLOW] += len(left)
        self._polish()
        self._without_folding()
        self._whole()
        self._conclude()
        return self.result

    def _enumerate(self) -> None:
        """Make all candidates, with their estimates by small traces.

        Raises:
            UserError: none can be traced.
        """
        self.say("small traces of the model and of the backends", 0.0)
        question, counts, refused = self.question, self.result.counts, self.result.refused
        savings = savings_of(question)
        estimates = Estimates(question.cell, question.gpus, *references(question, self.asking, savings))
        self._estimated = estimates, savings
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

    def _few_layers(self, waiting: Waiting) -> None:
        """Trace candidates with few layers until none is left that could be among the best."""
        best_s, patience = float("inf"), _PATIENCE
        # layouts with experts take long to trace: traces of all parts of a strategy tell of it too
        told = self.learned.knows_parts if has_experts(self.question.cell) else self.learned.knows
        while patience > 0 and (batch := self._next(waiting)):
            again = sum(_COUNTS if each.layout.pp >= _DEEP else 1 for each in batch if told(each.strategy))
            self._look(batch)
            self._leave_out_the_same(waiting)
            if best := self._best_layouts():
                patience -= again
                sum_s = sum(seen.step_s for seen in best[:BEST])
                if len(best) < BEST or sum_s * _GAIN < best_s:
                    best_s, patience = sum_s, _PATIENCE
                self.say(
                    f"{len(self.seen)} layouts traced with few layers; the best: {best[0].step_s:.3g} s, "
                    f"{best[0]}",
                    BEHIND["small"] + (1 - max(patience, 0) / _PATIENCE) * (BEHIND["few"] - BEHIND["small"]),
                )

    def _next(self, waiting: Waiting) -> list[Candidate]:
        """Take the most promising that could be among the best, one of each way and of each new strategy."""
        best = self._best_layouts()
        bar = best[BEST - 1].step_s if len(best) >= BEST else float("inf")
        of_kind = {(seen.cell.strategy, mesh_alone(seen.cell)): seen.step_s for seen in best}
        expected_s, least_s = self.learned.bounds(waiting)
        places = np.flatnonzero(waiting.left & (least_s <= bar))
        chosen: dict[int, Candidate] = {}
        begun: set[str | Way] = set()
        for at in places[np.argsort(expected_s[places], kind="stable")].tolist():
            candidate = waiting.candidates[at]
            name, way = candidate.strategy, candidate.layout.way
            soonest_s = min(expected_s[[*chosen]], default=float("inf"))
            if len(chosen) >= _AT_ONCE * max(2, self.asking.jobs) or expected_s[at] > UNKNOWN * soonest_s:
                break  # what takes so much longer has time until these are traced
            if name in begun or way in begun or least_s[at] > of_kind.get(candidate.kind, bar):
                continue
            if not self._may_fit(candidate) or self._outdone(candidate):
                continue
            if not self.learned.knows(name):
                # the first of a strategy tells how long its steps are only where one like it may fit
                if name in self._roomy and candidate.estimated_bytes * _ROOM > self.most_bytes:
                    continue
                if begun & (parts := self.learned.unsettled_parts(name)):
                    continue  # what one of them shows of the part tells of the others
                begun |= {name, *parts}
            begun.add(way)
            chosen[at] = candidate
        waiting.take(chosen)
        return [*chosen.values()]

    def _simpler(self, waiting: Waiting) -> None:
        """Look at layouts that by their estimates tie with the fastest, and are simpler than the one that
        would be named first, or as simple and of a strategy that was not traced."""
        for _ in range(_SIMPLER if self.fitting() else 0):
            best = self._best_layouts()
            named, most_s = complexity(ranked(best)[0].cell)[:2], tie_limit(best) * best[0].step_s
            expected_s = self.learned.bounds(waiting).expected_s
            places = waiting.simpler(named, expected_s, most_s, self.learned.knows, self._may_fit)
            chosen = {at: waiting.candidates[at] for at in islice(places, self.asking.jobs)}
            waiting.take(chosen)
            self._look([*chosen.values()])

    def _may_fit(self, candidate: Candidate) -> bool:
        return self.learned.least_bytes(candidate) <= self.most_bytes

    def _outdone(self, candidate: Candidate) -> bool:
        """Whether the same layout, with other settings of the model or with its states on the cards, takes
        no longer by the estimate and surely fits."""
        for rival in self._of_layouts[id(candidate.layout)]:
            if rival is candidate:
                return False  # the next ones take longer
            alike = rival.training in (candidate.training, candidate.twin)
            if alike and self.learned.most_bytes(rival) <= self.usable:
                return True
        return False

    def _look(self, chosen: Sequence[Candidate]) -> None:
        cells = [candidate.cell(self.question.cell) for candidate in chosen]
        candidate_of = {cell.key: candidate for cell, candidate in zip(cells, chosen, strict=True)}
        for seen in self._traced(cells, "few_layers"):
            found = candidate_of[seen.cell.key], seen.step_s, seen.peak
            self.learned.add(*found)
            self.same.add(*found)
        self.learned.fit()

    def _leave_out_the_same(self, waiting: Waiting) -> None:
        """Leave out the candidates whose steps are those of another strategy."""
        if self.same.replaced:
            others = waiting.leave_out(lambda strategy: self.same.instead(strategy) != strategy)
            self.result.counts[SAME_STEP] += others

    def _traced(self, cells: Sequence[Cell], depth: Depth) -> list[Seen]:
        """Look at cells; what was seen is kept in place of what was seen of them before. What cannot be run
        is counted and left out. The winner is among those traced whole, also by other attention kernels."""
        more = {"kernels": other_kernels(self.question.cell)} if depth == "all_layers" else {}
        traced = []
        for cell, outcome in looks(self.asking, cells, depth, **more):
            if outcome.status == "unsupported":
                self.result.refused.add(f"{cell.strategy} {cell.mesh_text}", outcome.reason)
                self.result.counts["cannot be run"] += 1
                self.seen.pop(cell.key, None)
            else:
                if depth == "all_layers" and (few := self.seen.get(cell.key)):
                    ratio = outcome.measurement["step_time_s"] / few.step_s
                    self.longer.setdefault(cell.strategy, []).append(ratio)
                self.seen[cell.key] = Seen(cell, outcome, depth)
                traced.append(self.seen[cell.key])
        return traced

    def fitting(self) -> list[Seen]:
        """The cells that fit and that the program has, if one is given; the fastest first. Of a model with
        experts, those that hardly fit by few layers count only where no others do; see :data:`_FULL`."""
        seen = [s for s in self.seen.values() if s.fits and self.question.runs(s.cell)]
        if has_experts(self.question.cell):
            seen = [s for s in seen if s.exact or s.peak <= _FULL * self.usable] or seen
        return sorted(self.same.without(seen), key=self._least_whole_s)

    def _least_whole_s(self, seen: Seen) -> float:
        """Seconds of a step by a trace of all layers, at the least: where two or more of its strategy took
        longer than by few layers, as where the host falls behind, so will this one."""
        ratios = self.longer.get(seen.cell.strategy, ())
        few = seen.depth != "all_layers" and len(ratios) > 1
        return seen.step_s * (min(ratios) if few else 1.0)

    # -- all layers ------------------------------------------------------------------------------------

    def _whole(self) -> None:
        """Trace the best with all layers, until the first :data:`_WHOLE` of them are, the one that is named
        first, and those named of which traces of few layers leave open whether they fit."""

        def wanted() -> list[Seen]:
            best = self._best_layouts()
            named = ranked(best)[:NAMED]
            return [*best[:_WHOLE], *named[:1], *(seen for seen in named if seen.doubtful)]

        while chosen := [seen.cell for seen in wanted() if seen.depth != "all_layers"]:
            self.say(f"tracing {len(chosen)} of the best with all layers", BEHIND["changes"])
            self._traced(chosen, "all_layers")

    def _polish(self) -> None:
        """Look at single changes of the best."""
        if not (fitting := self.fitting()):
            return
        changes = changes_beside(self.question, best := fitting[0].cell)
        self.say(f"{len(changes)} single changes of the best", BEHIND["few"])
        self._changes_looked_at(changes)
        waiting = cheaper_savings(self.question, best)
        while waiting:
            begun = waiting[: self.asking.jobs]
            self._changes_looked_at(begun)
            if any((seen := self.seen.get(cell.key)) and seen.fits for cell in begun):
                break  # the next ones save more memory, and take longer
            waiting = waiting[len(begun) :]

    def _without_folding(self) -> None:
        """Where the best layout folds, look for one of the best strategies that does not, until one fits."""
        fitting = self.fitting() if has_experts(self.question.cell) else []
        if not fitting or not folds_anew(fitting[0].cell.sizes.by_axis):
            return
        best = [seen.cell for seen in fitting[: 4 * BEST]]
        every = unfolded_layouts(self.question, self._estimated, best, self.usable)
        if not (small := [each for each in every if each.estimated_bytes <= self.too_large]):
            return
        order = np.argsort(self.learned.bounds(Waiting(small)).expected_s, kind="stable")
        for at in range(0, _UNFOLDED * self.asking.jobs, self.asking.jobs):
            if any(not folds_anew(seen.cell.sizes.by_axis) for seen in self.fitting()):
                return
            chosen = [small[n] for n in order[at : at + self.asking.jobs]]
            self._traced([each.cell(self.question.cell) for each in chosen], "few_layers")

    def _changes_looked_at(self, changes: Sequence[Cell]) -> None:
        cells = [cell for cell in changes if cell.key not in self.seen]
        self.result.counts["looked at"] += len(cells)
        self._traced(cells, "few_layers")

    # -- the end ---------------------------------------------------------------------------------------

    def _best_layouts(self) -> list[Seen]:
        return self._best_of(lambda cell: (cell.strategy, mesh_alone(cell)))

    def _best_of(self, kind: Callable[[Cell], Hashable]) -> list[Seen]:
        return best_of(self.fitting(), kind, self._least_whole_s)

    def _conclude(self) -> None:
        result, fitting = self.result, self.fitting()
        result.traced, result.same = [*self.seen.values()], self.same.replaced
        result.best = self._best_layouts()
        result.of_strategies = self._best_of(lambda cell: cell.strategy)
        if not fitting and self.seen:
            result.nearest = min(self.seen.values(), key=lambda s: s.peak)
        result.counts["traced with few layers"] = len(self.seen)
        result.counts["of these with all layers"] = sum(s.depth == "all_layers" for s in result.traced)
