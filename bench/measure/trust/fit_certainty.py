"""Whether a program fits its cards, and how sure that is: *fits*, *tight* or *no*.

What is simulated fits, and is *tight* where that rests on more than it can know: PyTorch's allocator has to
give memory back to the card; what it reserves is beyond the border, the least part of a card that a run has
here which was published as out of memory, or within the errors of such programs; or it reserves more than a
tenth, and no memory of such a program was ever measured. `spbench reproduce bands --write` writes the
evidence into fit_certainty.json.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.bands import PEAK, RESERVED, packaged, packaged_errors
from spbench.bench.measurement import filled, returned_bytes
from spbench.bench.units import card_gib, shown_share
from spbench.impls import MEETINGS, PLUS, model_preset

#: the verdicts on whether memory suffices
FITS, TIGHT, NO = "fits", "tight", "no"
#: the file of measured runs that the verdicts rest on
CERTAINTY_FILE = "fit_certainty.json"
#: so many measured numbers of a backend say how far its programs may be above what is simulated: by more than
#: this share of them were
_ENOUGH, _BEYOND = 5, 0.1
#: the part of a card that a kind which was never measured may reserve: such runs took up to four times more
_ROOM = 0.1
#: of a cell that searches for its length: what layers ask for does not depend on it
_ANY_LENGTH = 2**16


class Certainty(NamedTuple):
    """A verdict on whether a cell fits; ``reason``: why it is tight, else ""."""

    word: str
    reason: str = ""

    @property
    def answer(self) -> str:
        """The answer to whether the cell fits: "yes", "tight" or "no"."""
        return "yes" if self.word == FITS else self.word


class Filled(NamedTuple):
    """A published run here: the part of its card that it reserves, its :func:`kinds_of`, its backend, who
    published it, and whether it ran out of memory there and here."""

    part: float | None
    kinds: Collection[str]
    backend: str
    source: str
    published_oom: bool
    oom: bool


class Evidence(NamedTuple):
    """The evidence of published runs on whether cells fit.

    Attributes:
        border: the smallest share of its card that a run reserves here though it was published as out of
            memory, among kinds that were measured; 1 if there is none.
        kinds: of programs whose memory was measured, as :func:`kinds_of` names them.
    """

    border: float
    kinds: Collection[str]

    @classmethod
    def of(cls, runs: Iterable[Filled], kinds: Collection[str]) -> Evidence:
        """The evidence of some runs."""
        parts = (run.part for run in runs if run.published_oom and run.part and {*run.kinds} <= {*kinds})
        return cls(float(f"{min([1.0, *parts]):.4f}"), sorted(kinds))

    def judged(self, run: Filled) -> Certainty:
        """The verdict on a run."""
        if run.oom or run.part is None:
            return Certainty(NO if run.oom else FITS)
        unknown = sorted({*run.kinds} - {*self.kinds}) if run.part >= _ROOM else []
        reasons = [f"no memory of {kind} was ever measured" for kind in unknown]
        least = min(self.border, of_backend := _border_of(run.backend))
        if run.part >= least:
            further = f"a published run that reserves {shown_share(self.border)} here ran out of memory"
            if of_backend < self.border:
                further = (
                    f"one measured run in ten of {run.backend} took {1 / of_backend - 1:.0%} more than here"
                )
            reasons.insert(0, f"PyTorch reserves {shown_share(run.part)} of what it can have, and {further}")
        return Certainty(TIGHT, "; ".join(reasons)) if reasons else Certainty(FITS)


@cache
def packaged_evidence() -> Evidence:
    """The evidence that this version comes with."""
    return Evidence(**packaged(CERTAINTY_FILE))


@cache
def _border_of(backend: str) -> float:
    """The part of a card beyond which a tenth of a backend's measured runs would have needed more than all;
    1 where too few were measured."""
    errors = packaged_errors().get(backend, {})
    known = (errors[quantity] for quantity in (RESERVED, PEAK) if len(errors.get(quantity, ())) >= _ENOUGH)
    ascending: Sequence[float] = sorted(next(known, [0.0]))
    return min(1.0, 1 + ascending[math.floor(_BEYOND * len(ascending))])


def certainty(cell: Cell, measured: Mapping[str, Any]) -> Certainty | None:
    """The verdict on a cell that was measured on virtual ranks; None: it has no memory, or its card no limit.

    Args:
        measured: its measurement as rows have it: ``status``, ``usable_memory_bytes``, and ``by_class`` or
            ``reserved_memory_bytes``.
    """
    part = filled(measured)
    if part is None or cell.engine != "virtual" or measured.get("status") not in ("ok", "oom", "mismatch"):
        return None
    oom, returned = measured["status"] == "oom", returned_bytes(measured)
    # where segments are given back, what is reserved is all that there is
    part = 0.0 if returned else part
    run = Filled(part, kinds_of(cell), cell.training.backend, "", published_oom=False, oom=oom)
    word, reason = packaged_evidence().judged(run)
    if word == NO or not returned:
        return Certainty(word, reason)
    back = f"PyTorch gives {card_gib(returned)} GiB of segments back to the full card in a step"
    return Certainty(TIGHT, "; ".join([f"{back}, the time of which is not counted", *filter(None, [reason])]))


def kinds_of(cell: Cell) -> frozenset[str]:
    """The kinds of program whose memory a cell stands for: each strategy with each way in which positions
    meet, and experts that are spread over ranks, with the backend."""
    model: Any = model_preset(*cell.model_arguments)
    meetings = {site.kind for site in model.sites(1, cell.seq_len or _ANY_LENGTH)} & {*MEETINGS}
    parts = [part for part in cell.strategy.split(PLUS) if part != "single"]
    kinds = {f"{part} of {meeting.replace('_', ' ')}" for part in parts for meeting in meetings}
    if getattr(model, "experts", 0) and cell.sizes.by_axis.get("ep", 1) > 1:
        kinds.add(f"experts spread over ranks under {cell.training.backend}")
    return frozenset(kinds)
