"""Strategies that do the same for a model, so that one of them is enough.

Odysseus leaves an MLP's weights whole, and Megatron-SP splits them; but where experts take the place of all
MLPs, both divide attention alone, and alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from spbench.bench.tools.advise.candidates import Candidate
from spbench.bench.tools.advise.ranking import Seen
from spbench.impls.strategies.nesting import PLUS

#: steps are the same whose seconds and bytes differ by no larger part
_SAME = 1e-3
#: ranks along axes on which two strategies take the same steps before one of them stands for both
_ENOUGH = 2
#: what became of layouts whose strategy another one stands for
SAME_STEP = "the same step by another strategy"


class SameSteps:
    """Which strategies take the same steps as others, by traces of layouts that differ in strategy alone."""

    def __init__(self) -> None:
        #: by layout and settings, the seconds and bytes of each strategy
        self._seen: dict[Hashable, dict[str, tuple[float, float]]] = {}
        #: by two strategies, on which axes their steps were the same
        self._same: dict[tuple[str, str], set[Hashable]] = {}
        self._unlike: set[tuple[str, str]] = set()

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
            if all(high <= low * (1 + _SAME) for low, high in (times, sizes)):
                self._same.setdefault(pair, set()).add(axes)
            else:
                self._unlike.add(pair)
        seen[own] = seconds, nbytes

    @property
    def replaced(self) -> Mapping[str, str]:
        """By strategy that another one stands for, that one: the first of both in the alphabet."""
        enough = sorted(pair for pair, axes in self._same.items() if len(axes) >= _ENOUGH)
        return {second: first for first, second in reversed(enough) if (first, second) not in self._unlike}

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
