"""What a search has looked at: the closest look at each cell so far, the best of these, how much of the
search is behind, and which strategies take the same steps as others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from spbench.bench.cell import Cell
from spbench.bench.measure import load_cluster
from spbench.bench.tools.choose.asking import Asking, Say, unheard
from spbench.bench.tools.choose.candidates import Candidate, mesh_alone
from spbench.bench.tools.choose.look import Depth, looks
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import SearchResult, Seen, best_of, has_experts
from spbench.impls.strategies.nesting import PLUS

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
        self.ended(0, 0)

    def ended(self, n: int, of: int) -> None:
        """So many of these looks have ended."""
        self._left, (low, high) = max(self._left, of), self._span
        self.say(self.text, low + (high - low) * (self._ended + n) / max(1, self._ended + self._left))
        if n == of:
            self._ended, self._left = self._ended + n, self._left - n


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


#: steps are the same whose seconds and bytes differ by no larger part
_SAME = 1e-3
#: ranks along axes on which two strategies take the same steps before one of them stands for both
_ENOUGH = 2
#: what became of layouts whose strategy another one stands for
SAME_STEP = "the same step by another strategy"


class SameSteps:
    """Which strategies take the same steps as others, by traces of layouts that differ in strategy alone.

    Odysseus leaves an MLP's weights whole, and Megatron-SP splits them; but where experts take the place of
    all MLPs, both divide attention alone, and alike.
    """

    def __init__(self) -> None:
        #: by layout and settings, the seconds and bytes of each strategy
        self._seen: dict[Hashable, dict[str, tuple[float, float]]] = {}
        #: by two strategies, whether their steps were the same on each of the axes
        self._alike: dict[tuple[str, str], dict[Hashable, bool]] = {}

    def add(self, candidate: Candidate, seconds: float, nbytes: float) -> None:
        """What a trace of a candidate found."""
        layout, own = candidate.layout, candidate.strategy
        axes = tuple(layout.way.axes.items())
        of_ranks = (axes, layout.dp, layout.pp, layout.micro_batch, layout.virtual_stages, layout.fold)
        settings = candidate.training_text, candidate.saving_text
        seen = self._seen.setdefault((*of_ranks, *settings), {})
        for strategy, (other_s, other_bytes) in seen.items():
            if (pair := _differing(own, strategy)) is None:
                continue
            times, sizes = sorted((seconds, other_s)), sorted((nbytes, other_bytes))
            alike = self._alike.setdefault(pair, {})
            alike[axes] = alike.get(axes, True) and all(b <= a * (1 + _SAME) for a, b in (times, sizes))
        seen[own] = seconds, nbytes

    @property
    def replaced(self) -> Mapping[str, str]:
        """By strategy that another one stands for, that one: the first of both in the alphabet."""
        same = sorted(pair for pair, of in self._alike.items() if len(of) >= _ENOUGH and all(of.values()))
        return {second: first for first, second in reversed(same)}

    def instead(self, strategy: str) -> str:
        """The strategy whose steps stand for those of this one; itself, if none does."""
        replaced = self.replaced
        return PLUS.join(replaced.get(part, part) for part in strategy.split(PLUS))

    def without(self, seen: Sequence[Seen]) -> list[Seen]:
        """Without those that are there with another strategy, which stands for theirs, on the same mesh."""
        there = {(each.cell.strategy, each.cell.mesh_text) for each in seen}
        instead = [(self.instead(each.cell.strategy), each.cell.mesh_text) for each in seen]
        both = zip(seen, instead, strict=True)
        return [each for each, other in both if each.cell.strategy == other[0] or other not in there]


def _differing(strategy: str, other: str) -> tuple[str, str] | None:
    """The parts in which two strategies differ, in the order of the alphabet; None: not in one alone."""
    own, others = strategy.split(PLUS), other.split(PLUS)
    parts = [pair for pair in zip(own, others, strict=False) if pair[0] != pair[1]]
    if len(own) != len(others) or len(parts) != 1:
        return None
    first, second = sorted(parts[0])
    return first, second
