"""The changes that make a cell fit, each proved by a trace, and the largest sizes that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.setting_changes import changed, written
from spbench.bench.tools.fit.answers import FIT, Answers, Say, unheard, within
from spbench.bench.tools.fit.card_memory import CardMemory, card_memory
from spbench.bench.tools.fit.suggestions import Change, both, pairs, single_changes

#: share of the time that single changes take, roughly, where pairs follow
_SINGLE = 0.7
#: changes that are proved at the most
MOST = 10
#: pairs of changes that are run at the most, and so many that fit are enough
MOST_PAIRS, ENOUGH_PAIRS = 12, 3


@dataclass(frozen=True)
class Proof:
    """A change that was tried.

    Attributes:
        cell: with the change.
        measurement: of it, as rows have it; of a change that few layers show to need too much, its estimated
            peak alone.
        fits: whether it fits the card.
    """

    change: Change
    cell: Cell
    measurement: Mapping[str, Any]
    fits: bool

    @property
    def memory(self) -> CardMemory:
        """What its card must have; of a change not traced whole, by its estimated peak."""
        anatomy = (self.measurement.get("meters") or {}).get(FIT)
        needed: int = anatomy["least_usable_bytes"] if anatomy else self.measurement["peak_memory_bytes"]
        return card_memory(self.cell, self.measurement, needed)

    def line(self, now_s: float | None) -> dict[str, Any]:
        """Plain data for programs.

        Args:
            now_s: the step time without the change.
        """
        step_s = self.measurement.get("step_time_s")
        return {
            "set": written(self.change.settings),
            "what": self.change.words,
            "other_job": self.change.other_job,
            "cell": self.cell.key,
            "fits": self.fits,
            **self.memory.record(),
            "peak_memory_bytes": self.measurement["peak_memory_bytes"],
            "step_time_s": step_s,
            "relative_step_time": step_s / now_s if step_s and now_s else None,
        }


@dataclass(frozen=True)
class Proofs:
    """What became of the changes of a cell.

    Attributes:
        found: those that fit and take less than the cell does, the shortest step first, other jobs last; at
            most :data:`MOST`.
        tried, pairs_tried: how many single ones were run, and how many of two together.
        closest: of those that do not fit, the one that needs least; None: each fits, or cannot be run.
    """

    found: Sequence[Proof]
    tried: int
    closest: Proof | None
    pairs_tried: int = 0


def prove(cell: Cell, total_bytes: int, answers: Answers, say: Say = unheard) -> Proofs:
    """Try the single changes of a cell, the likely cheapest first, until :data:`MOST` fit. Where none is
    enough that leaves the job what it is, the pairs of them that may be are tried; where strategies were
    tried and none is, the pairs with a strategy.

    Args:
        total_bytes: what a card must have for the cell as it is; changes that need no less are left out.
        answers: whose run is :func:`attempt`.
        say: told of each change that was tried, and of the share that is behind.
    """
    changes = single_changes(cell)
    found, missed, tried = _tried(cell, total_bytes, changes, MOST, answers, within(say, 0, _SINGLE))
    pairs_tried = 0
    alone = [each.change for each in found if not each.change.other_job]
    dividing = any(each.change.divides for each in missed) and not any(each.divides for each in alone)
    if dividing or not alone:
        promising = _promising_pairs(changes, [*found, *missed], total_bytes, dividing=bool(alone))
        told = within(say, _SINGLE, 1)
        in_pairs, missed_pairs, pairs_tried = _tried(
            cell, total_bytes, promising, ENOUGH_PAIRS, answers, told
        )
        found, missed = [*found, *in_pairs], [*missed, *missed_pairs]
    # what cannot be timed, as on a cluster without a link to its hosts, after what can
    found.sort(
        key=lambda p: (
            p.change.other_job,
            p.measurement.get("step_time_s") or math.inf,
            p.memory.total_bytes,
        )
    )
    closest = min(missed, key=lambda p: p.memory.total_bytes, default=None)
    return Proofs(found[:MOST], tried, closest, pairs_tried)


def _tried(
    cell: Cell,
    total_bytes: int,
    changes: Iterable[Change],
    enough: int,
    answers: Answers,
    say: Say,
) -> tuple[list[Proof], list[Proof], int]:
    """The changes that fit and take less than the cell does, until there are enough of them; those that do
    not fit; and how many were run. What cannot be is left out."""
    made_of: dict[str, tuple[Change, Cell]] = {}
    for change in changes:
        try:
            made = changed(cell, change.settings)
        except UserError:  # of options that exclude each other
            continue
        if made.key != cell.key:
            made_of.setdefault(made.key, (change, made))
    found: list[Proof] = []
    missed: list[Proof] = []
    tried = 0
    outcomes = answers([made for _, made in made_of.values()], lambda: len(found) >= enough)
    for number, (made, outcome) in enumerate(outcomes, 1):
        if outcome.status in ("ok", "oom"):
            tried += 1
            proof = Proof(*made_of[made.key], outcome.measurement, outcome.status == "ok")
            if not proof.fits:
                missed.append(proof)
            elif proof.memory.total_bytes < total_bytes:
                found.append(proof)
        text = written(made_of[made.key][0].settings)
        found_out = "fits" if outcome.status == "ok" else outcome.reason or outcome.status
        say(f"{text}: {found_out}", number / len(made_of))
    return found, missed, tried


def _promising_pairs(
    changes: Iterable[Change], proofs: Sequence[Proof], total_bytes: int, dividing: bool
) -> Iterator[Change]:
    """Pairs of changes, each of which helps, that fit together if each takes off the same share as it does
    alone: the likely cheapest first, at most :data:`MOST_PAIRS`. Where there are none, the few that come
    nearest to it.

    Args:
        changes: the single ones, those that cost least first.
        proofs: what was found of them.
        total_bytes: as of :func:`prove`.
        dividing: only those with a strategy that divides samples.
    """
    left = {written(each.change.settings): each.memory.total_bytes / total_bytes for each in proofs}
    helping = [each for each in changes if left.get(written(each.settings), 1.0) < 1]
    found = [
        (left[written(one.settings)] * left[written(other.settings)], both(one, other))
        for one, other in pairs(helping)
        if one.divides or other.divides or not dividing
    ]
    wanted = proofs[0].memory.card_bytes / total_bytes if proofs else 0.0
    likely = [change for share, change in found if share <= wanted]
    nearest = [change for _, change in sorted(found, key=lambda pair: pair[0])]
    yield from likely[:MOST_PAIRS] or nearest[:ENOUGH_PAIRS]


def largest(cell: Cell, answers: Answers) -> dict[str, Any]:
    """The longest ``seq_len`` and the largest ``micro_batch`` (and ``batch``) that fit, each with all else as
    it is, proved by a trace that fits and one that does not; None: not even the smallest does, or it cannot
    be searched for.

    Args:
        answers: whose run is :func:`attempt`.
    """
    asked = {
        quantity: cell.model_copy(update={quantity: None, "search": SearchRequest(quantity=quantity)})
        for quantity in ("seq_len", "batch")
    }
    quantity_of = {each.key: quantity for quantity, each in asked.items()}
    found: dict[str, Any] = {}
    for each, outcome in answers([*asked.values()]):
        found[quantity_of[each.key]] = outcome.measurement.get("answer")
    batch = found["batch"]
    parts = cell.sizes.dp * cell.training.micro_batches
    return {
        "seq_len": found["seq_len"],
        "micro_batch": batch and batch // parts,
        "batch": batch,
    }
