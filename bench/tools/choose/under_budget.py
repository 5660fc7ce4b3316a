"""`spbench fit --budget`: the memory switches that together need no more than a number of bytes, at the least
cost in time.

Each switch is traced alone; but recomputation of some layers, whose trace runs all of them, counts as that
share of what recomputing all layers does. What a switch takes off the peak of each phase, and what it adds to
the step, are the coefficients of an integer program, in which the savings of switches add up. Its solution is
traced; where it needs more than the program took it to, it is ruled out and the next one is solved for. Since
savings do not add up exactly, parts of the solution, pairs that may fit, and what counts as a share are
traced too, the cheapest first, until none is left that would be cheaper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.tools.choose.anatomy import Anatomy, examine
from spbench.bench.tools.choose.asking import Asking, Say, Task, unheard
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.suggestions import (
    MODULES,
    RECOMPUTE,
    Change,
    cells_of,
    share_of_layers,
    switches,
    together,
)

#: the settings of recomputation of all layers
_ALL_LAYERS = {RECOMPUTE: "full"}
#: solutions of the integer program that are traced at the most
_MOST_SOLVED = 12
#: a pair is traced where it would fit if the two together took off so many times what they do apart
_MORE_TOGETHER = 1.5
#: part of a step that each switch costs beside its own time, so that none is taken for nothing
_LEAST_COST = 1e-6


@dataclass(frozen=True)
class BudgetPlan:
    """The switches that bring a cell within a budget.

    Attributes:
        budget_bytes: what the fullest rank may need.
        before: the cell without further switches.
        chosen: the cell with the switches that cost least; None: no switches that were tried fit.
        alone: the cell with each switch by itself, the cheapest first; switches for a part of the layers are
            left out if they would cost more than what is chosen.
        traced: how many cells were traced.
    """

    budget_bytes: int
    before: Verdict
    chosen: Verdict | None
    alone: Sequence[Verdict]
    traced: int

    def fits(self, verdict: Verdict) -> bool:
        """Whether the cell needs no more than the budget, and its hosts have the memory."""
        return verdict.within(self.budget_bytes)


def peaks_by_phase(anatomy: Anatomy) -> dict[tuple[int, str], int]:
    """Bytes at the largest moment of each phase, by the number of its kind's occurrence and its name; from
    the curve, whose moments are the largest of their runs of events."""
    kinds = [values for name, values in anatomy.curve.items() if name != "event"]
    totals = np.sum(np.array(kinds), axis=0)
    names, starts = zip(*anatomy.phases, strict=True)
    places = np.maximum(0, np.searchsorted(starts, anatomy.curve["event"], side="right") - 1)
    return {
        (names[:place].count(names[place]), names[place]): int(totals[places == place].max(initial=0))
        for place in dict.fromkeys(places.tolist())
    }


@dataclass
class Search:
    """What has been traced for a budget, and what may still be cheaper."""

    cell: Cell
    budget_bytes: int
    asking: Asking
    say: Say
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def trace(self, changes: Iterable[Change]) -> list[Verdict]:
        """The verdicts of changes that can be run; those that were traced before are not traced again."""
        by_key = cells_of(self.cell, changes)
        tasks = [Task(other, examine) for key, (other, _) in by_key.items() if key not in self.verdicts]
        for task, outcome in self.asking(tasks):
            if outcome.status in ("ok", "oom"):
                change = by_key[task.cell.key][1]
                self.verdicts[task.cell.key] = Verdict(task.cell, outcome.measurement, change)
                self.say(f"{len(self.verdicts)} traced", min(1.0, len(self.verdicts) / 40))
        return [self.verdicts[key] for key in by_key if key in self.verdicts]

    def timed(self, changes: Iterable[Change]) -> list[Verdict]:
        """The verdicts of changes that can be run and timed."""
        return [each for each in self.trace(changes) if each.step_s]

    def fits(self, verdict: Verdict) -> bool:
        return verdict.within(self.budget_bytes)

    def cheaper(self, sets: Iterable[tuple[float, Sequence[Change]]]) -> None:
        """Trace sets of switches, with the seconds of their steps if costs add up, the cheapest first, until
        none is left that would be cheaper than what fits."""
        waiting = iter(sets)
        while several := [*itertools.islice(waiting, self.asking.jobs)]:
            best = self.cheapest()
            limit = math.inf if best is None else best.step_s or math.inf
            if not (cheaper := [changes for seconds, changes in several if seconds < limit]):
                return
            self.trace(as_one(cheaper))

    def cheapest(self) -> Verdict | None:
        """The shortest step of all that were traced and fit; among equals the fewest settings."""

        def cost(verdict: Verdict) -> tuple[float, int]:
            assert verdict.change is not None
            return verdict.step_s or math.inf, len(verdict.change.settings)

        return min(filter(self.fits, self.verdicts.values()), key=cost, default=None)


def plan_budget(cell: Cell, budget_bytes: int, asking: Asking, say: Say = unheard) -> BudgetPlan:
    """Choose the switches of a cell for a budget.

    Args:
        asking: runs :func:`examine`.
        say: takes what is done, and the share that is behind.

    Raises:
        UserError: the cell cannot be run or timed.
    """
    search = Search(cell, budget_bytes, asking, say)
    before = next(iter(search.trace([Change({}, "as it is")])), None)
    if before is None or not before.step_s:
        raise UserError(f"{cell.key}: --budget weighs times, and its step cannot be timed")
    if search.fits(before):
        return BudgetPlan(budget_bytes, before, before, (), 1)
    every = switches(cell)
    shares = {n: share for n, each in enumerate(every) if (share := share_of_layers(cell, each))}
    alone = search.timed(each for n, each in enumerate(every) if n not in shares)
    full = next((each for each in alone if each.change and each.change.settings == _ALL_LAYERS), None)
    if full is None:
        alone = search.timed(every)
    rows = [_Row(each.change, each) for each in alone if each.change]
    rows += [_Row(every[n], full, share) for n, share in shares.items() if full is not None]
    program = _Program(before, rows, budget_bytes)
    solutions = itertools.islice(program.solutions(), _MOST_SOLVED)
    while (parts := next(solutions, None)) is not None:
        if any(map(search.fits, search.trace(as_one([parts])))):
            search.cheaper(program.fewer(parts))
            break
    search.cheaper(program.pairs())
    alone = [each for each in search.verdicts.values() if each.step_s and each.change in every]
    alone.sort(key=lambda verdict: verdict.step_s or math.inf)
    return BudgetPlan(budget_bytes, before, search.cheapest(), alone, len(search.verdicts))


def as_one(several: Iterable[Sequence[Change]]) -> Iterator[Change]:
    """Each set of switches that go together, as one change."""
    for changes in several:
        if change := together(changes):
            yield change


class _Row(NamedTuple):
    """A switch by itself: it does a ``share`` of what was traced; 1 if the switch itself was traced."""

    change: Change
    traced: Verdict
    share: float = 1.0


class _Program:
    """The integer program: x is 1 for a switch that is taken.

    Args:
        before: the cell as it is.
        rows: each switch by itself.
        budget_bytes: what the fullest rank may need.
    """

    def __init__(self, before: Verdict, rows: Sequence[_Row], budget_bytes: int):
        peaks = peaks_by_phase(before.anatomy)
        # what is needed beside the tensors' peak: fragmentation, and what is outside PyTorch
        self.beside = before.memory.total_bytes - before.anatomy.peak_memory_bytes
        self.excess = np.array([n + self.beside - budget_bytes for n in peaks.values()], dtype=float)
        self.shares = np.array([each.share for each in rows])
        after = [peaks_by_phase(each.traced.anatomy) for each in rows]
        saved = np.array([[n - each.get(key, n) for each in after] for key, n in peaks.items()], float)
        self.saved = saved * self.shares
        self.seconds = before.step_s or 0.0
        more = np.array([(each.traced.step_s or 0.0) - self.seconds for each in rows])
        self.costs = more * self.shares + _LEAST_COST * self.seconds
        self.changes = [each.change for each in rows]
        self.untraced = [(n,) for n, each in enumerate(rows) if each.share < 1]
        self.apart = [
            (a, b)
            for a, b in itertools.combinations(range(len(rows)), 2)
            if together([self.changes[a], self.changes[b]]) is None
        ]

    def solutions(self) -> Iterator[Sequence[Change]]:
        """Sets of switches that fit if their savings add up, the cheapest set first."""
        count = len(self.changes)
        if not count:
            return
        rules = [scipy.optimize.LinearConstraint(self.saved, self.excess, np.inf)]
        for a, b in self.apart:
            row = np.zeros(count)
            row[[a, b]] = 1
            rules.append(scipy.optimize.LinearConstraint(row, -np.inf, 1))
        while True:
            answer = scipy.optimize.milp(
                self.costs,
                constraints=rules,
                integrality=np.ones(count),
                bounds=scipy.optimize.Bounds(0, 1),
            )
            if answer.x is None:
                return
            taken = np.flatnonzero(answer.x > 0.5)
            if len(taken):
                yield [self.changes[at] for at in taken]
            row = np.where(answer.x > 0.5, 1.0, -1.0)  # not this one again
            rules.append(scipy.optimize.LinearConstraint(row, -np.inf, len(taken) - 1))

    def pairs(self) -> Iterator[tuple[float, Sequence[Change]]]:
        """Pairs and switches that count as a share, if they may fit, with the seconds of their steps if costs
        add up, the cheapest first."""
        apart = {*self.apart}
        pairs = (pair for pair in itertools.combinations(range(len(self.changes)), 2) if pair not in apart)
        return self._promising(itertools.chain(self.untraced, pairs))

    def fewer(self, parts: Sequence[Change]) -> Iterator[tuple[float, Sequence[Change]]]:
        """Parts of a set of switches that may fit, in the form of :meth:`pairs`."""
        places = [self.changes.index(part) for part in parts]
        sizes = range(2, len(parts))
        return self._promising(each for n in sizes for each in itertools.combinations(places, n))

    def _promising(self, sets: Iterable[Sequence[int]]) -> Iterator[tuple[float, Sequence[Change]]]:
        """The sets of switches that fit, if together they save somewhat more than the sum of each."""
        for seconds, taken in sorted((self.seconds + self._least_cost(taken), taken) for taken in sets):
            saved, _ = self._beside_each_other(taken)
            if np.all(saved.sum(axis=1) * _MORE_TOGETHER >= self.excess):
                yield seconds, [self.changes[at] for at in taken]

    def _least_cost(self, taken: Sequence[int]) -> float:
        """The summed cost of the switches ``taken``; the largest cost alone if two share a setting."""
        _, costs = self._beside_each_other(taken)
        settings = [{*self.changes[at].settings} - {MODULES, RECOMPUTE} for at in taken]
        shared = sum(map(len, settings)) > len(set[str]().union(*settings))
        return float(costs.max() if shared else costs.sum())

    def _beside_each_other(self, taken: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """(bytes saved in each phase, cost) of each of several switches. Beside a switch for a share of the
        layers, the recomputation of all layers counts only for the other layers."""
        saved, costs, shares = self.saved[:, [*taken]], self.costs[[*taken]], self.shares[[*taken]]
        some = int(shares.argmin())
        if (share := shares[some]) < 1:
            recompute = [self.changes[at].settings.get(RECOMPUTE) for at in taken]
            of_all = [value == "full" and at != some for at, value in enumerate(recompute)]
            saved -= np.outer(saved[:, some] / share, of_all)
            costs -= costs[some] / share * np.array(of_all)
        return saved, costs
