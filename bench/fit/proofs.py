"""The single changes that make a cell fit, each proved by a trace, and the largest sizes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.config.changes import changed, written
from spbench.bench.errors import UserError
from spbench.bench.fit.answers import FIT, Answers
from spbench.bench.fit.suggestions import Change, single_changes

#: changes that are proved at the most
MOST = 10


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
    def needed_bytes(self) -> int:
        """Of the smallest card on which it fits; of a change not traced whole, the estimated peak."""
        anatomy = (self.measurement.get("meters") or {}).get(FIT)
        needed: int = anatomy["least_usable_bytes"] if anatomy else self.measurement["peak_memory_bytes"]
        return needed

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
            "needed_bytes": self.needed_bytes,
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
        tried: how many were run.
        closest: of those that do not fit, the one that needs least; None: each fits, or cannot be run.
    """

    found: Sequence[Proof]
    tried: int
    closest: Proof | None


def prove(
    cell: Cell, needed_bytes: int, answers: Answers, say: Callable[[str], None] = lambda text: None
) -> Proofs:
    """Try the single changes of a cell, the likely cheapest first, until :data:`MOST` fit.

    Args:
        needed_bytes: what the cell needs as it is; changes that need no less are left out.
        answers: whose run is :func:`attempt`.
        say: told of each change that was tried.
    """
    changes: dict[str, tuple[Change, Cell]] = {}
    for change in single_changes(cell):
        try:
            made = changed(cell, change.settings)
        except UserError:  # of options that exclude each other
            continue
        if made.key != cell.key:
            changes.setdefault(made.key, (change, made))
    found: list[Proof] = []
    missed: list[Proof] = []
    tried = 0
    for made, outcome in answers([made for _, made in changes.values()], lambda: len(found) >= MOST):
        if outcome.status in ("ok", "oom"):
            tried += 1
            proof = Proof(*changes[made.key], outcome.measurement, outcome.status == "ok")
            if not proof.fits:
                missed.append(proof)
            elif proof.needed_bytes < needed_bytes:
                found.append(proof)
        text = written(changes[made.key][0].settings)
        say(f"{text}: {'fits' if outcome.status == 'ok' else outcome.reason or outcome.status}")
    # what cannot be timed, as on a cluster without a link to its hosts, after what can
    found.sort(
        key=lambda p: (p.change.other_job, p.measurement.get("step_time_s") or math.inf, p.needed_bytes)
    )
    closest = min(missed, key=lambda p: p.needed_bytes, default=None)
    return Proofs(found[:MOST], tried, closest)


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
