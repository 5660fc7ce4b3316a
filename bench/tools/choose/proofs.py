"""The changes that make a cell fit, each proved by a trace; and the switches of `spbench fit --budget`.

For a budget each switch is traced alone; but recomputation of some layers, whose trace would run all layers,
counts as that share of the effect of recomputing all. For each set of switches, the bytes that they take off
the peak of each phase are added up, and the seconds that they add to the step. The cheapest set that fits by
these sums is traced, and if it needs more than the budget, the next. Because savings do not add up exactly,
parts of that set, pairs that may fit, and switches that count as a share are traced too, the cheapest first,
while they can be cheaper.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure import MemoryLog, written
from spbench.bench.tools.choose import suggestions
from spbench.bench.tools.choose.anatomy import peaks_by_phase
from spbench.bench.tools.choose.asking import Asking, Run, Say, Task, unheard, within
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.look import attempt, examine
from spbench.bench.units import GIB

#: share of the progress that single changes make, if pairs follow
_SINGLE = 0.7
#: how many changes that fit are enough with --suggest, and without that option
MOST, ENOUGH = 10, 3
#: the most pairs of changes that are traced
MOST_PAIRS = 12
#: the settings of several switches of recomputation, which are united
_UNITED = {suggestions.MODULES, suggestions.RECOMPUTE}
#: the settings of recomputation of all layers
_ALL_LAYERS = {suggestions.RECOMPUTE: "full"}
#: the most sets whose savings add up that are traced; about how many cells a budget traces
_MOST_SETS, _TRACED = 12, 40
#: switches are traced together if they would fit with their savings added up and multiplied by this
_MORE_TOGETHER = 1.5
#: a set of switches: their indices among the rows
_Set = tuple[int, ...]
#: share of a step that each switch costs besides its own time, so that no useless switch is taken
_LEAST_COST = 1e-6


@dataclass
class Tried:
    """Changes of a cell that were tried.

    Attributes:
        cell: the cell without changes.
        asking: the workers that run the function ``run`` on changed cells.
        verdicts: by cell key, the verdicts of cells that can run, in the order in which they were tried.
    """

    cell: Cell
    asking: Asking
    run: Run = examine
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def trace(
        self,
        changes: Iterable[suggestions.Change],
        say: Say = unheard,
        enough: Callable[[], bool] = lambda: False,
    ) -> list[Verdict]:
        """The verdicts of changes whose cells can run; cells that were traced before are not traced again.

        Args:
            say: takes each change that was tried, and the share of the changes that are done.
            enough: asked before each trace. Once it is True, none begins, and verdicts of later changes are
                left out, because how many of these a machine has traced by then depends on its load.
        """
        by_key = suggestions.cells_of(self.cell, changes)
        tasks = [Task(other, self.run) for key, (other, _) in by_key.items() if key not in self.verdicts]
        for number, (task, outcome) in enumerate(self.asking(tasks, enough), 1):
            change = by_key[task.cell.key][1]
            if outcome.status in ("ok", "oom"):
                self.verdicts[task.cell.key] = Verdict(task.cell, outcome.measurement, change)
            ending = "fits" if outcome.status == "ok" else outcome.reason or outcome.status
            say(f"{written(change.settings)}: {ending}", number / len(tasks))
        for key, verdict in [(task.cell.key, self.verdicts.pop(task.cell.key, None)) for task in tasks]:
            if verdict and not enough():
                self.verdicts[key] = verdict
        return [self.verdicts[key] for key in by_key if key in self.verdicts]


# -- changes that make a cell fit ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Proofs:
    """The outcome of trying changes of a cell.

    Attributes:
        fitting: verdicts on changed cells that fit and need less, the shortest step first, other jobs last.
        tried, pairs_tried: how many single changes were run, and how many pairs.
        closest: the verdict that needs least of those that do not fit; None: there is no such verdict.
    """

    fitting: Sequence[Verdict]
    tried: int
    closest: Verdict | None
    pairs_tried: int = 0


def prove(before: Verdict, asking: Asking, most: int = MOST, say: Say = unheard) -> Proofs:
    """Try single changes of a cell, the likely cheapest first. If no single change that keeps the job's
    length and batch makes the cell fit, pairs of changes are tried; if no change of strategy does, pairs with
    a strategy. A change of the model that leaves states too large for the card is tried only for pairs.

    Args:
        before: the verdict on the cell without changes.
        asking: the workers that run :func:`attempt`.
        most: how many single changes that fit are enough.
        say: takes each change that was tried, and the share of the trials that are done.
    """
    changes = suggestions.single_changes(before.cell)
    tried = Tried(before.cell, asking, attempt, {before.cell.key: before})

    def fitting() -> list[Verdict]:
        fit = (each for each in tried.verdicts.values() if each is not before and each.fits)
        return [each for each in fit if each.memory.total_bytes < before.memory.total_bytes]

    def run(some: Iterable[suggestions.Change], most: int, say: Say) -> int:
        """Try changes until ``most`` more fit; returns how many were run."""
        several, fit = len(tried.verdicts), len(fitting())
        tried.trace(some, say, lambda: len(fitting()) - fit >= most)
        return len(tried.verdicts) - several

    usable = before.measurement["usable_memory_bytes"]
    # states of training, which no change that is only of the model makes smaller
    states = sum(before.anatomy.held.get(kind, 0) for kind in MemoryLog.STATES)
    may_fit = [change for change in changes if states <= usable or not change.of_model]
    singles, pairs_tried = run(may_fit, most, within(say, 0, _SINGLE)), 0
    alone = [change for each in fitting() if (change := each.change) and not change.other_job]
    divides = [each.fits for each in tried.verdicts.values() if each.change and each.change.divides]
    dividing = not all(divides) and not any(change.divides for change in alone)
    if dividing or not alone:
        singles += run([each for each in changes if each not in may_fit], most, unheard)
        promising = [*_promising_pairs(changes, before, tried.verdicts.values(), dividing=bool(alone))]
        pairs_tried = run(promising, ENOUGH, within(say, _SINGLE, 1))

    def order(each: Verdict) -> tuple[bool, float, int]:
        """Other jobs come last, and before these cells without a step time, for lack of a rate."""
        other_job = each.change is not None and each.change.other_job
        return other_job, each.step_s or math.inf, each.memory.total_bytes

    missed = (each for each in tried.verdicts.values() if each is not before and not each.fits)
    closest = min(missed, key=lambda each: each.memory.total_bytes, default=None)
    return Proofs(sorted(fitting(), key=order)[:MOST], singles, closest, pairs_tried)


def _promising_pairs(
    changes: Iterable[suggestions.Change], before: Verdict, tried: Iterable[Verdict], dividing: bool
) -> Iterator[suggestions.Change]:
    """Pairs of changes that each help, and that fit together if each reduces memory by the same factor as it
    does alone: the likely cheapest first, at most :data:`MOST_PAIRS`. If there are none, the few nearest.

    Args:
        changes: single changes, the cheapest first.
        before: the verdict on the cell without changes.
        tried: verdicts on the single changes.
        dividing: only pairs with a strategy that divides samples.
    """
    needed = before.memory.total_bytes
    left = {written(v.change.settings): v.memory.total_bytes / needed for v in tried if v.change}
    helping = enumerate(each for each in changes if left.get(written(each.settings), 1.0) < 1)
    by_cost = sorted(itertools.combinations(helping, 2), key=lambda two: two[0][0] + two[1][0])
    shares = [
        (left[written(one.settings)] * left[written(other.settings)], change)
        for (_, one), (_, other) in by_cost
        if (one.divides or other.divides or not dividing) and (change := suggestions.together([one, other]))
    ]
    likely = [change for share, change in shares if share <= before.memory.card_bytes / needed]
    nearest = [change for _, change in sorted(shares, key=lambda pair: pair[0])]
    yield from likely[:MOST_PAIRS] or nearest[:ENOUGH]


# -- switches for a budget -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetPlan:
    """The switches that bring a cell within a budget.

    Attributes:
        budget_bytes: the bytes that the fullest rank may need.
        before: the cell without further switches.
        chosen: the cell with the switches that cost least; None: no switches that were tried fit.
        alone: the cell with each single switch, the cheapest first; switches for a part of the layers that
            would cost more than ``chosen`` are left out.
        traced: the number of traced cells.
    """

    budget_bytes: int
    before: Verdict
    chosen: Verdict | None
    alone: Sequence[Verdict]
    traced: int

    def fits(self, verdict: Verdict) -> bool:
        """Whether the cell needs no more than the budget, and its hosts have the memory."""
        return verdict.within(self.budget_bytes)


def plan_budget(cell: Cell, budget_bytes: int, asking: Asking, say: Say = unheard) -> BudgetPlan:
    """Choose the switches of a cell for a budget.

    Args:
        asking: the workers that run :func:`examine`.
        say: takes the current work in words, and the share of it that is done.

    Raises:
        UserError: the cell cannot be run or timed.
    """
    traced = (tried := Tried(cell, asking)).verdicts

    def timed(changes: Iterable[suggestions.Change]) -> list[Verdict]:
        ran = tried.trace(changes, lambda *_: say(f"{len(traced)} traced", min(1.0, len(traced) / _TRACED)))
        return [each for each in ran if each.step_s]

    def cost(verdict: Verdict) -> tuple[float, int]:
        return verdict.step_s or math.inf, len(verdict.change.settings) if verdict.change else 0

    def cheapest() -> Verdict | None:
        """The verdict with the shortest step of all that fit; among equals the one with fewest settings."""
        fitting = (each for each in traced.values() if each.within(budget_bytes))
        return min(fitting, key=cost, default=None)

    def cheaper(sets: Iterator[tuple[float, _Set]]) -> None:
        """Trace sets of switches, until none is left that would be cheaper than the best that fits."""
        while several := [*itertools.islice(sets, asking.jobs)]:
            limit, _ = cost(best) if (best := cheapest()) else (math.inf, 0)
            if not (fast := [taken for added, taken in several if (1 + added) * seconds < limit]):
                return
            timed(suggestions.as_one(map(sums.changes, fast)))

    if (before := next(iter(timed([suggestions.Change({}, "as it is")])), None)) is None:
        raise UserError(f"{cell.key}: --budget weighs times, and its step cannot be timed")
    if before.within(budget_bytes):
        return BudgetPlan(budget_bytes, before, before, (), 1)
    every = suggestions.switches(cell)
    shares = {n: share for n, each in enumerate(every) if (share := suggestions.share_of_layers(cell, each))}
    alone = timed(each for n, each in enumerate(every) if n not in shares)
    full = next((each for each in alone if each.change and each.change.settings == _ALL_LAYERS), None)
    if full is None:
        alone = timed(every)
    rows = [_Row(each.change, each) for each in alone if each.change]
    rows += [_Row(every[n], full, share) for n, share in shares.items() if full is not None]
    sums, seconds, solution = _Sums(before, rows, budget_bytes), before.step_s or 0.0, _Set()
    for _, taken in itertools.islice(sums.cheapest(range(len(rows))), _MOST_SETS):
        if any(each.within(budget_bytes) for each in timed(suggestions.as_one([sums.changes(taken)]))):
            solution = taken
            break
    cheaper(itertools.islice(sums.cheapest(solution, _MORE_TOGETHER), _MOST_SETS))
    cheaper(sums.cheapest(range(len(rows)), _MORE_TOGETHER, size=2))
    alone = [each for each in traced.values() if each.step_s and each.change in every]
    alone.sort(key=lambda each: each.step_s or math.inf)
    return BudgetPlan(budget_bytes, before, cheapest(), alone, len(traced))


class _Row(NamedTuple):
    """A single switch, with ``share`` of the effect that was traced; 1 if the switch itself was traced."""

    change: suggestions.Change
    traced: Verdict
    share: float = 1.0


class _Sums:
    """The savings and costs of sets of switches, one switch for each row: the sums of those of single
    switches, less what two of them have in common. The cheapest set is the solution of an integer program,
    because n independent switches have 2^n sets.
    """

    def __init__(self, before: Verdict, rows: Sequence[_Row], budget_bytes: int):
        self.rows = rows
        peaks, seconds = peaks_by_phase(before.anatomy), before.step_s or 0.0
        # bytes needed besides the tensors' peak: fragmentation, and memory outside PyTorch
        beside = before.memory.total_bytes - before.anatomy.peak_memory_bytes
        #: GiB that a set must save in each phase, and that each switch saves, [phases, switches]; and the
        #: share of a step that each switch adds
        self.excess = np.array([n + beside - budget_bytes for n in peaks.values()]) / GIB
        shares, after = [each.share for each in rows], [peaks_by_phase(each.traced.anatomy) for each in rows]
        saved = np.array([[n - each.get(key, n) for each in after] for key, n in peaks.items()])
        self.saved = saved / GIB * shares
        more = np.array([(each.traced.step_s or 0.0) / seconds - 1 for each in rows])
        self.costs = more * shares + _LEAST_COST
        pairs = [*itertools.combinations(range(len(rows)), 2)]
        self.apart = {pair for pair in pairs if suggestions.together(self.changes(pair)) is None}
        common = ((pair, self._in_common(*pair)) for pair in pairs if pair not in self.apart)
        self.common = {pair: both for pair, both in common if both is not None}

    def changes(self, taken: Iterable[int]) -> list[suggestions.Change]:
        """The switches at these indices of rows."""
        return [self.rows[at].change for at in taken]

    def _in_common(self, a: int, b: int) -> tuple[np.ndarray, float] | None:
        """(GiB saved in each phase, share of a step) that count once for two switches; None: nothing."""
        for part, other in ((a, b), (b, a)):
            recompute = self.rows[other].change.settings.get(suggestions.RECOMPUTE)
            if (share := self.rows[part].share) < 1 and recompute == "full":  # it is for the other layers
                return self.saved[:, part] / share, self.costs[part] / share
        names, others = ({*change.settings} - _UNITED for change in self.changes((a, b)))
        return (0 * self.excess, min(self.costs[[a, b]])) if names & others else None

    def cheapest(
        self, of: Collection[int], times: float = 1.0, size: int | None = None
    ) -> Iterator[tuple[float, _Set]]:
        """(share of a step that it adds, set) for each set of the switches ``of``, at most ``size`` of them,
        that would fit if it saved ``times`` as much as by the sums; the cheapest set first."""
        # a variable for each switch, then one for each pair with something in common: 1 if a set has it
        n, in_common = len(self.rows), [*self.common.values()]

        def row(plus: Iterable[int], minus: Iterable[int] = ()) -> np.ndarray:
            factors = np.zeros(n + len(in_common))
            factors[[*plus]], factors[[*minus]] = 1, -1
            return factors

        saved = np.column_stack([self.saved, *(-gib for gib, _ in in_common)])
        rules = [(times * own, need, np.inf) for own, need in zip(saved, self.excess, strict=True)]
        rules += [(row(range(n)), 1, size or n), *((row(pair), 0, 1) for pair in self.apart)]
        for at, pair in enumerate(self.common, n):
            rules += [(row(pair, [at]), 0, 1), *((row([each], [at]), 0, 1) for each in pair)]
        costs = np.array([*self.costs, *(-cost for _, cost in in_common)])
        allowed = [float(at in of or at >= n) for at in range(len(costs))]
        while n:
            matrix, low, high = (np.array(each) for each in zip(*rules, strict=True))
            solved = scipy.optimize.milp(
                costs / _LEAST_COST,
                integrality=np.ones(len(costs)),
                bounds=(0, allowed),
                constraints=(matrix, low, high),
                options={"mip_rel_gap": 0},
            )
            if solved.x is None:
                return
            taken = np.flatnonzero(solved.x[:n] > 0.5).tolist()
            yield float(costs @ solved.x), tuple(taken)
            # the next set is another one
            rules.append((row(taken, [at for at in range(n) if at not in taken]), -np.inf, len(taken) - 1))
