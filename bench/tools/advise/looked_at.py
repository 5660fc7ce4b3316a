"""What a search has looked at: the closest look at each cell so far, the best of these, and how much of the
search is behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.advise.candidates import mesh_alone
from spbench.bench.tools.advise.look import Depth, looks
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.ranking import SearchResult, Seen, best_of, has_experts
from spbench.bench.tools.advise.same_steps import SameSteps
from spbench.bench.tools.fit.asking import Asking, Say, unheard

#: of a model with experts, whose ranks along ep can be raised for little, a layout that takes a larger share
#: of a card by few layers counts as one that does not fit, as long as another one does
_FULL = 0.95


class Behind:
    """How much of a search is behind: in each part of it, of the looks that it will probably take those that
    have ended.

    Args:
        say: takes what is done, and the share that is behind.
    """

    def __init__(self, say: Say):
        self.say, self.text = say, ""
        self._span, self._ended, self._left = (0.0, 0.0), 0, 0

    def begin(self, text: str, low: float, high: float) -> None:
        """Begin a part, which is from one share of the search to another."""
        self.text, self._span, self._ended = text, (low, high), 0
        self.say(text, low)

    def expect(self, text: str, left: int) -> None:
        """Say what is done, and how many looks this part will probably still take."""
        self.text, self._left = text, left
        self._shown(0)

    def ended(self, n: int, of: int) -> None:
        """So many of these looks have ended."""
        self._left = max(self._left, of)
        self._shown(n)
        if n == of:
            self._ended, self._left = self._ended + n, self._left - n

    def _shown(self, n: int) -> None:
        low, high = self._span
        self.say(self.text, low + (high - low) * (self._ended + n) / max(1, self._ended + self._left))


class LookedAt:
    """What a search for one question has looked at.

    Args:
        asking: traces layouts.
        say: takes what is done.

    Attributes:
        seen: by key, the closest look at each cell of the search.
        same: strategies whose steps are those of others.
    """

    def __init__(self, question: Question, asking: Asking, say: Say = unheard):
        self.question, self.asking, self.behind = question, asking, Behind(say)
        self.usable = load_cluster(question.cell.cluster).usable_memory_bytes or float("inf")
        self.most_bytes = self.usable * (_FULL if has_experts(question.cell) else 1.0)
        self.result, self.seen, self.same = SearchResult(), dict[str, Seen](), SameSteps()
        #: by strategy, how much longer steps were by traces of all layers than by those of few
        self._longer: dict[str, list[float]] = {}

    def looked_at(self, cells: Sequence[Cell], depth: Depth) -> list[Seen]:
        """Look at cells; what was seen is kept in place of what was seen of them before. What cannot be run
        is counted and left out."""
        seen = []
        for cell, outcome in looks(self.asking, cells, depth, self.behind.ended):
            if outcome.status == "unsupported":
                self.result.refused.add(f"{cell.strategy} {cell.mesh_text}", outcome.reason)
                self.result.counts["cannot be run"] += 1
                self.seen.pop(cell.key, None)
            else:
                if depth == "all_layers" and (few := self.seen.get(cell.key)):
                    ratio = outcome.measurement["step_time_s"] / few.step_s
                    self._longer.setdefault(cell.strategy, []).append(ratio)
                self.seen[cell.key] = Seen(cell, outcome, depth)
                seen.append(self.seen[cell.key])
        return seen

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
        ratios = self._longer.get(seen.cell.strategy, ())
        return seen.step_s * (min(ratios) if not seen.exact and len(ratios) > 1 else 1.0)

    def best_layouts(self) -> list[Seen]:
        """Of each strategy and mesh the best; see :func:`best_of`."""
        return self._best_of(lambda cell: (cell.strategy, mesh_alone(cell)))

    def best_strategies(self) -> list[Seen]:
        """Of each strategy the best."""
        return self._best_of(lambda cell: cell.strategy)

    def _best_of(self, kind: Callable[[Cell], Hashable]) -> list[Seen]:
        return best_of(self.fitting(), kind, self._least_whole_s)
