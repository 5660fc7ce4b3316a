"""The changes that make a cell fit, each proved by a trace, and the largest sizes that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure import written
from spbench.bench.tools.choose.anatomy import Anatomy, attempt
from spbench.bench.tools.choose.asking import Asking, Say, Task, unheard, within
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.suggestions import Change, both, cells_of, pairs, single_changes

#: share of the time that single changes take, roughly, where pairs follow
_SINGLE = 0.7
#: changes that are proved at the most, and so many that fit are enough unless more are asked for
MOST, ENOUGH = 10, 3
#: pairs of changes that are run at the most
MOST_PAIRS = 12
#: kinds of memory that no switch of the model takes off
_STATES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class Proofs:
    """The outcome of trying changes of a cell.

    Attributes:
        fitting: changed cells that fit and take less than the cell, the shortest step first, other jobs last.
        tried, pairs_tried: how many single changes were run, and how many pairs.
        closest: of cells that do not fit, the one that needs least; None: each fits, or cannot be run.
    """

    fitting: Sequence[Verdict]
    tried: int
    closest: Verdict | None
    pairs_tried: int = 0


class Prover:
    """Tries changes of a cell, until enough fit.

    Args:
        cell: the cell without changes.
        total_bytes: what a card must have for it; changes that need no less are no help.
        asking: runs :func:`attempt`.

    Attributes:
        fitting, missed: cells with changes that fit and help, and cells that do not fit, in the order in
            which they were tried; cells that cannot be run are in neither.
    """

    def __init__(self, cell: Cell, total_bytes: int, asking: Asking):
        self.cell, self.total_bytes, self.asking = cell, total_bytes, asking
        self.fitting: list[Verdict] = []
        self.missed: list[Verdict] = []

    def attempt(self, changes: Iterable[Change], enough: int, say: Say) -> int:
        """Run changes until so many more fit; returns how many were run."""
        by_key = cells_of(self.cell, changes)
        by_key.pop(self.cell.key, None)
        tried, before = 0, len(self.fitting)
        tasks = [Task(other, attempt) for other, _ in by_key.values()]
        outcomes = self.asking(tasks, lambda: len(self.fitting) - before >= enough)
        for number, (task, outcome) in enumerate(outcomes, 1):
            change = by_key[task.cell.key][1]
            if outcome.status in ("ok", "oom"):
                tried += 1
                verdict = Verdict(task.cell, outcome.measurement, change)
                if outcome.status == "oom":
                    self.missed.append(verdict)
                elif verdict.memory.total_bytes < self.total_bytes:
                    self.fitting.append(verdict)
            ending = "fits" if outcome.status == "ok" else outcome.reason or outcome.status
            say(f"{written(change.settings)}: {ending}", number / len(by_key))
        return tried


def prove(before: Verdict, asking: Asking, most: int = MOST, say: Say = unheard) -> Proofs:
    """Try the single changes of a cell, the likely cheapest first. If none is enough that leaves the job what
    it is, pairs of changes that may be enough are tried; if strategies were tried and none is enough, also
    pairs with a strategy. A change that cannot fit, by what it leaves of the peak, is tried only for pairs.

    Args:
        before: the cell as it is.
        asking: as of :class:`Prover`.
        most: so many single changes that fit are enough.
        say: takes each change that was tried, and the share that is done.
    """
    changes, prover = single_changes(before.cell), Prover(before.cell, before.memory.total_bytes, asking)
    usable = before.measurement["usable_memory_bytes"]
    enough = [change for change in changes if left_bytes(change, before.anatomy) <= usable]
    tried, pairs_tried = prover.attempt(enough, most, within(say, 0, _SINGLE)), 0
    alone = [change for each in prover.fitting if (change := each.change) and not change.other_job]
    divided = [each for each in prover.missed if each.change and each.change.divides]
    dividing = bool(divided) and not any(change.divides for change in alone)
    if dividing or not alone:
        tried += prover.attempt([each for each in changes if each not in enough], most, unheard)
        promising = [*_promising_pairs(changes, prover, dividing=bool(alone))]
        pairs_tried = prover.attempt(promising, ENOUGH, within(say, _SINGLE, 1))

    def order(each: Verdict) -> tuple[bool, float, int]:
        """Other jobs last, and before them what cannot be timed, as without a link to the hosts."""
        other_job = each.change is not None and each.change.other_job
        return other_job, each.step_s or math.inf, each.memory.total_bytes

    closest = min(prover.missed, key=lambda each: each.memory.total_bytes, default=None)
    return Proofs(sorted(prover.fitting, key=order)[:MOST], tried, closest, pairs_tried)


def left_bytes(change: Change, anatomy: Anatomy) -> int:
    """Bytes that a change surely leaves of a cell's largest moment: the states of training, which each step
    has, if the change is only in how the model computes; else 0."""
    of_model = all(name.startswith("model_options.") for name in change.settings)
    return sum(anatomy.held.get(kind, 0) for kind in _STATES) if of_model else 0


def _promising_pairs(changes: Iterable[Change], prover: Prover, dividing: bool) -> Iterator[Change]:
    """Pairs of changes, each of which helps, that fit together if each takes off the same share as it does
    alone: the likely cheapest first, at most :data:`MOST_PAIRS`. If there are none, the few pairs that come
    nearest.

    Args:
        changes: single changes, the cheapest first.
        prover: has tried them.
        dividing: only pairs with a strategy that divides samples.
    """
    proofs = [*prover.fitting, *prover.missed]
    left = {
        written(each.change.settings): each.memory.total_bytes / prover.total_bytes
        for each in proofs
        if each.change
    }
    helping = [each for each in changes if left.get(written(each.settings), 1.0) < 1]
    shares = [
        (left[written(one.settings)] * left[written(other.settings)], both(one, other))
        for one, other in pairs(helping)
        if one.divides or other.divides or not dividing
    ]
    wanted = proofs[0].memory.card_bytes / prover.total_bytes if proofs else 0.0
    likely = [change for share, change in shares if share <= wanted]
    nearest = [change for _, change in sorted(shares, key=lambda pair: pair[0])]
    yield from likely[:MOST_PAIRS] or nearest[:ENOUGH]


@dataclass(frozen=True)
class Largest:
    """The largest sizes that fit, each with all else as it is; None: not even the smallest fits, or it cannot
    be searched for. ``batch`` is the whole one, of micro-batches of ``micro_batch`` samples."""

    seq_len: int | None
    micro_batch: int | None
    batch: int | None


def largest(cell: Cell, asking: Asking) -> Largest:
    """Search for the largest sizes, each proved by a trace that fits and one that does not."""
    quantities = ("seq_len", "batch")
    searches = [
        cell.model_copy(update={quantity: None, "search": SearchRequest(quantity=quantity)})
        for quantity in quantities
    ]
    answers = {
        task.cell.search.quantity: outcome.measurement.get("answer")
        for task, outcome in asking([Task(each, attempt) for each in searches])
        if task.cell.search
    }
    batch = answers["batch"]
    parts = cell.sizes.dp * cell.training.micro_batches
    return Largest(answers["seq_len"], batch and batch // parts, batch)
