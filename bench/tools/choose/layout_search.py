"""The search for the fastest layouts: it traces promising layouts with few layers, in the order of their
estimates, and the best of these with all layers.

A trace of few layers also shows how far the estimates of its strategy on these axes, of its backend and of
its micro-batches are off, and corrects the order. The search ends when no layout is left whose least time
(:meth:`Learned.bounds`) is below that of the fifth best, or when many traces in a row have changed nothing.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure import executor_at
from spbench.bench.tools.choose import candidates, ranking
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.asking import Asking, Say, unheard, within
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.fit_verdict import has_experts
from spbench.bench.tools.choose.layouts import Way, things_to_set
from spbench.bench.tools.choose.learned import SAME_STEP, UNKNOWN, Waiting
from spbench.bench.tools.choose.possible import absence, why_impossible
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.references import references, savings_of
from spbench.bench.tools.choose.whole_looks import LookedAt, changes_beside, cheaper_savings

#: how many layouts are traced with few layers at once, for each worker
_AT_ONCE = 3
#: how many of the best layouts the search looks for
BEST = ranking.NAMED
#: the traces of few layers end after this many of strategies that were traced before, if they have not made
#: the best together faster by this factor
_PATIENCE, _GAIN = 12, 1.02
#: a trace of this many stages takes several times as long, and counts as this many traces
_DEEP, _COUNTS = 8, 3
#: the shares of the progress at which parts of a search begin and end: small traces, traces of few layers
#: (with about this many changes of the best), and traces of all layers
_BEHIND = {"small": (0.08, 0.15), "few": (0.15, 0.4), "all": (0.4, 1.0)}
_BESIDE = 6
#: a layout probably fits if a card has this many times its estimated bytes
_ROOM = 1.1
#: how many rounds of simpler layouts are traced, each with one layout for each worker
_SIMPLER = 4
#: the bytes of a look at its peak
_PEAK = attrgetter("peak")


class Search(LookedAt):
    """The search for one question; the module's docstring says how.

    Args:
        asking: the workers that trace layouts.
        say: takes the current work in words, and the share of the search that is done.

    Attributes:
        every: all candidates; empty until :meth:`run` has enumerated these.
    """

    def __init__(self, question: Question, asking: Asking, say: Say = unheard):
        super().__init__(question, asking, say)
        #: no layout with more estimated bytes is traced; corrected estimates must be at most
        #: :attr:`most_bytes`
        self.too_large = candidates.FAR_TOO_LARGE * self.usable
        self.every, self.bar = list[candidates.Candidate](), candidates.Bar()
        #: the candidates of each layout, by the layout's id, the fastest by the estimate first
        self._of_layouts: dict[int, list[candidates.Candidate]] = defaultdict(list)
        self._roomy = set[str]()  # strategies with a layout that probably fits

    def run(self) -> ranking.SearchResult:
        """Run the search; returns its result.

        Raises:
            UserError: no layout is possible.
        """
        if reason := why_impossible(self.question):
            raise UserError(reason)
        self._enumerate()
        waiting = [c for c in self.every if c.estimated_bytes <= self.too_large]
        if not waiting:  # trace the smallest, to name the nearest
            waiting = sorted(self.every, key=lambda c: c.estimated_bytes)[: 2 * BEST]
            self.most_bytes = float("inf")
        self.behind.begin(f"{len(self.every)} layouts, of which {len(waiting)} may fit", *_BEHIND["few"])
        (counts := self.result.counts)[candidates.TOO_LARGE] += len(self.every) - len(waiting)
        if own := self.question.own:  # the job's own layout may be the best too
            self.result.own = next(iter(self.looked_at([own.looked_at], "all_layers")), None)
        self._roomy = {c.strategy for c in waiting if c.estimated_bytes * _ROOM <= self.most_bytes}
        for candidate in sorted(waiting, key=lambda each: each.estimated_s):
            self._of_layouts[id(candidate.layout)].append(candidate)
        left = Waiting(waiting)
        self._few_layers(left)
        if self.most_bytes < self.usable and not self.fitting():  # now also layouts that hardly fit
            self.most_bytes = self.usable
            self._few_layers(left)
        self._simpler(left)
        counts[candidates.TOO_SLOW] += len(left)
        self._polish()
        self.behind.begin("the best with all layers", *_BEHIND["all"])
        self.look_whole()
        while self.seen and not self.fitting() and not (near := min(self.seen.values(), key=_PEAK)).exact:
            self.looked_at([near.cell], "all_layers")  # few layers may say too many bytes
            self.look_whole()
        self._conclude()
        return self.result

    def _enumerate(self) -> None:
        """Make all candidates, with their estimates by small traces.

        Raises:
            UserError: no candidate can be traced.
        """
        self.behind.begin("small traces of the model and of the backends", *_BEHIND["small"])
        question, counts, refused = self.question, self.result.counts, self.result.refused
        savings = savings_of(question)
        estimates = Estimates(
            question.cell, question.gpus, *references(question, self.asking, savings, self.behind.ended)
        )
        self.every = [
            *candidates.Candidates(question, estimates, savings, refused, self.usable, counts, self.bar)
        ]
        if not self.every:
            reasons = ", or ".join(dict.fromkeys(refused.values()))
            reason = reasons or "no backend or setting can be traced"
            raise UserError(f"no layout of {question.gpus} GPUs can be traced: {reason}")
        counts["cannot be"] = len(refused)
        others = sum(counts[each] for each in (candidates.SLOWER, candidates.TOO_SLOW, candidates.TOO_LARGE))
        counts["looked at"] = len(self.every) + others + len(refused)

    # -- few layers ------------------------------------------------------------------------------------

    def _few_layers(self, waiting: Waiting) -> None:
        """Trace candidates with few layers until none is left that could be among the best."""
        best_s, patience = float("inf"), _PATIENCE
        # layouts with experts take long to trace, so traces of all parts of a strategy are enough
        told = self.learned.knows_parts if has_experts(self.question.cell) else self.learned.knows
        while patience > 0 and (batch := self._next(waiting)):
            again = [each for each in batch if told(each.strategy)]
            self._look(batch)
            if self.learned.replaced:  # leave out candidates whose steps are those of another strategy
                others = waiting.leave_out(lambda strategy: self.learned.instead(strategy) != strategy)
                self.result.counts[SAME_STEP] += others
            if best := self.best_layouts():
                patience -= sum(_COUNTS if each.layout.pp >= _DEEP else 1 for each in again)
                sum_s = sum(seen.step_s for seen in best[:BEST])
                if len(best) < BEST or sum_s * _GAIN < best_s:
                    best_s, patience = sum_s, _PATIENCE
                self.behind.expect(
                    f"{len(self.seen)} layouts traced with few layers; the best: {best[0].step_s:.3g} s, "
                    f"{best[0]}",
                    max(patience, 0) + _BESIDE,
                )

    def _next(self, waiting: Waiting) -> list[candidates.Candidate]:
        """Take the most promising candidates that may be among the best: one for each way and new
        strategy."""
        best = self.best_layouts()
        bar = best[BEST - 1].step_s if len(best) >= BEST else float("inf")
        of_kind = {seen.kind: seen.step_s for seen in best}
        expected_s, least_s = self.learned.bounds(waiting)
        places = np.flatnonzero(waiting.left & (least_s <= bar))
        chosen: dict[int, candidates.Candidate] = {}
        begun: set[str | Way] = set()
        for at in places[np.argsort(expected_s[places], kind="stable")].tolist():
            candidate = waiting.candidates[at]
            name, way = candidate.strategy, candidate.layout.way
            soonest_s = min(expected_s[[*chosen]], default=float("inf"))
            if len(chosen) >= _AT_ONCE * max(2, self.asking.jobs) or expected_s[at] > UNKNOWN * soonest_s:
                break  # slower candidates wait until these are traced
            if name in begun or way in begun or least_s[at] > of_kind.get(candidate.kind, bar):
                continue
            if not self._may_fit(candidate) or self._outdone(candidate):
                continue
            if not self.learned.knows(name):
                # the first trace of a strategy should be of a layout that probably fits, if the strategy has
                # any
                if name in self._roomy and candidate.estimated_bytes * _ROOM > self.most_bytes:
                    continue
                if begun & (parts := self.learned.unsettled_parts(name)):
                    continue  # one trace of the unsettled part is enough for now
                begun |= {name, *parts}
            begun.add(way)
            chosen[at] = candidate
        waiting.take(chosen)
        return [*chosen.values()]

    def _simpler(self, waiting: Waiting) -> None:
        """Look at layouts that by their estimates tie with the fastest, and are simpler than the layout that
        would be named first (or as simple, but of an untraced strategy)."""
        for _ in range(_SIMPLER if self.fitting() else 0):
            best = self.best_layouts()
            most_s = ranking.tie_limit(best) * best[0].step_s
            things, *axes = ranking.complexity(ranking.ranked(best)[0].cell)[:2]
            named = things - things_to_set("single", self.question.cell.model_options, {}), *axes
            expected_s = self.learned.bounds(waiting).expected_s
            places = waiting.simpler(named, expected_s, most_s, self.learned.knows, self._may_fit)
            chosen = {at: waiting.candidates[at] for at in islice(places, self.asking.jobs)}
            waiting.take(chosen)
            self._look([*chosen.values()])

    def _may_fit(self, candidate: candidates.Candidate) -> bool:
        return self.learned.least_bytes(candidate) <= self.most_bytes

    def _outdone(self, candidate: candidates.Candidate) -> bool:
        """Whether the same layout, with other settings of the model or with its states on the cards, takes
        no longer by the estimate and surely fits."""
        for rival in self._of_layouts[id(candidate.layout)]:
            if rival is candidate:
                return False  # the next candidates take longer
            if rival.family == candidate.family and self.learned.most_bytes(rival) <= self.usable:
                return True
        return False

    def _look(self, chosen: Sequence[candidates.Candidate]) -> None:
        cells = [candidate.cell(self.question.cell) for candidate in chosen]
        candidate_of = {cell.key: candidate for cell, candidate in zip(cells, chosen, strict=True)}
        for seen in self.looked_at(cells, "few_layers"):
            self.learned.add(candidate_of[seen.cell.key], seen.step_s, seen.peak)
        self.learned.fit()

    # -- beside the best -----------------------------------------------------------------------------

    def _polish(self) -> None:
        """Look at the best layout with single settings changed."""
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
                break  # the next changes save more memory and take longer
            waiting = waiting[len(begun) :]

    def _changes_looked_at(self, changes: Sequence[Cell]) -> None:
        cells = [cell for cell in changes if cell.key not in self.seen]
        self.result.counts["looked at"] += len(cells)
        self.looked_at(cells, "few_layers")

    # -- the end ---------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        result, fitting = self.result, self.fitting()
        result.traced, result.same = [*self.seen.values()], self.learned.replaced
        result.best = self.best_layouts()
        result.of_strategies = self.best_strategies()
        if not fitting and self.seen:
            result.nearest = min(self.seen.values(), key=_PEAK)
        result.counts["traced with few layers"] = len(self.seen)
        result.counts["of these with all layers"] = sum(s.depth == "all_layers" for s in result.traced)


def answered(
    questions: Sequence[Question],
    jobs: int | None = None,
    say: Say = unheard,
    executor: str | None = None,
    asked_about: Mapping[str, int] = {},
) -> Iterator[Advice]:
    """Yield the answer to each question as soon as the answer is there. Among several questions, one without
    any layout has an answer that says so.

    Args:
        jobs: how many workers; None: one for each usable core.
        say: takes the current work in words, and the share of all questions that is done.
        executor: the address for :func:`executor_at`, where layouts are traced; None: this machine.
        asked_about: ranks along axes; each answer says why layouts with these ranks are not named.

    Raises:
        UserError: no layout of the only question is possible.
    """
    elsewhere = executor_at(executor)
    with elsewhere as there, Asking(jobs, there) as asking:
        for number, each in enumerate(questions):
            say_here = within(say, number / len(questions), (number + 1) / len(questions))
            begun, cpu_s = time.monotonic(), time.process_time() + asking.cpu_s
            search = Search(each, asking, say_here)
            try:
                result = search.run()
            except UserError as error:
                if len(questions) == 1:
                    raise
                result = ranking.SearchResult(impossible=str(error))
            winner, of_search = Advice(each, result).winner, (search.every, search.too_large, search.bar)
            prices = search.prices(winner) if winner else ()
            why = absence(each, result, asked_about, *of_search) if asked_about else ()
            cpu_s = time.process_time() + asking.cpu_s - cpu_s
            yield Advice(each, result, time.monotonic() - begun, cpu_s, prices, why)
