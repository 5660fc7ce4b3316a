"""Whether a program fits its cards, and how sure that is: *fits*, *tight* or *no*.

A program that fits in simulation is *tight* in three cases: PyTorch's allocator has to give memory back to
the card; or the reserved part of the card is above the border, which is the least part in simulation of a run
published as out of memory, or above the like limit of the backend's errors; or a program of a kind whose
memory was never measured reserves more than a tenth of the card. `spbench reproduce bands --write` writes the
evidence into fit_certainty.json.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Self

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.measure.trust.bands import PEAK, RESERVED, packaged, packaged_errors
from spbench.bench.measurement import filled, returned
from spbench.bench.units import card_gib, shown_share
from spbench.impls import MEETINGS, PLUS, model_preset

#: how many measured numbers a backend needs for a border, and the share of them that may lie beyond it
_ENOUGH, _BEYOND = 5, 0.1
#: the part of a card that an unmeasured kind of program may reserve: such runs took up to four times more
_ROOM = 0.1
#: the length for cells that search for one, on which the kinds of attention do not depend
_ANY_LENGTH = 2**16


class Certainty(NamedTuple):
    """A verdict on whether a cell fits: ``word``, and ``reason``, which says why it is tight, else ""."""

    word: Literal["fits", "tight", "no"]
    reason: str = ""

    @property
    def answer(self) -> str:
        """The answer to whether the cell fits: "yes", "tight" or "no"."""
        return "yes" if self.word == "fits" else self.word


class Filled(NamedTuple):
    """A published run and its simulation: the simulated part of the card that is reserved, :func:`kinds_of`,
    the backend, who published it, and whether it was out of memory as published and as simulated."""

    part: float | None
    kinds: Collection[str]
    backend: str
    source: str
    published_oom: bool
    oom: bool


@dataclass(frozen=True)
class Evidence:
    """The evidence of published runs on whether cells fit.

    Attributes:
        border: the smallest simulated share of a card that a run published as out of memory reserves, among
            runs of measured kinds; 1 if there is none.
        kinds: the kinds of programs whose memory was measured, as :func:`kinds_of` names them.
    """

    #: the file of measured runs that the verdicts rest on
    FILE = "fit_certainty.json"

    border: float
    kinds: Collection[str]

    @classmethod
    def of(cls, runs: Iterable[Filled], kinds: Collection[str]) -> Self:
        """The evidence of published runs; ``kinds`` are the measured ones."""
        parts = (run.part for run in runs if run.published_oom and run.part and {*run.kinds} <= {*kinds})
        return cls(float(f"{min([1.0, *parts]):.4f}"), sorted(kinds))

    def judged(self, run: Filled) -> Certainty:
        """The verdict on a run: whether it fits, and why it is tight."""
        if run.oom or run.part is None:
            return Certainty("no" if run.oom else "fits")
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
        return Certainty("tight", "; ".join(reasons)) if reasons else Certainty("fits")


@cache
def packaged_evidence() -> Evidence:
    """The evidence of published runs that this version comes with."""
    return Evidence(**packaged(Evidence.FILE))


@cache
def _border_of(backend: str) -> float:
    """The part of a card beyond which a tenth of a backend's measured runs would have needed more than the
    whole card; 1 where too few runs were measured."""
    errors = packaged_errors().get(backend, {})
    known = (errors[quantity] for quantity in (RESERVED, PEAK) if len(errors.get(quantity, ())) >= _ENOUGH)
    ascending: Sequence[float] = sorted(next(known, [0.0]))
    return min(1.0, 1 + ascending[math.floor(_BEYOND * len(ascending))])


def certainty(cell: Cell, measured: Mapping[str, Any]) -> Certainty | None:
    """The verdict on a cell that ran on virtual ranks; None: the cell has no memory, or its card no limit.

    Args:
        measured: the cell's measurement in a row: ``status``, ``usable_memory_bytes``, and ``by_class`` or
            ``reserved_memory_bytes``.
    """
    part = filled(measured)
    if part is None or cell.engine != "virtual" or measured.get("status") not in ("ok", "oom", "mismatch"):
        return None
    oom, given_back = measured["status"] == "oom", returned(measured.get("by_class") or ())
    # where segments are given back, the whole card is reserved
    part = 0.0 if given_back else part
    # fully_shard is eager torch too
    backend = "zero3" if cell.strategy == OWN_STEP else cell.training.backend
    run = Filled(part, kinds_of(cell), backend, "", published_oom=False, oom=oom)
    word, reason = packaged_evidence().judged(run)
    if word == "no" or not given_back:
        return Certainty(word, reason)
    back = f"PyTorch gives {card_gib(given_back)} GiB of segments back to the full card in a step"
    back += "; a step is longer by more than the driver's calls for them, which are counted"
    return Certainty("tight", "; ".join([back, *filter(None, [reason])]))


def kinds_of(cell: Cell) -> frozenset[str]:
    """The kinds of program that a cell's memory is evidence for, such as a strategy with the kind of
    attention, or experts spread over ranks with the backend."""
    if cell.strategy == OWN_STEP:
        return frozenset()
    model: Any = model_preset(*cell.model_arguments)
    meetings = {site.kind for site in model.sites(1, cell.seq_len or _ANY_LENGTH)} & {*MEETINGS}
    parts = [part for part in cell.strategy.split(PLUS) if part != "single"]
    kinds = {f"{part} of {meeting.replace('_', ' ')}" for part in parts for meeting in meetings}
    if getattr(model, "experts", 0) and cell.sizes.by_axis.get("ep", 1) > 1:
        kinds.add(f"experts spread over ranks under {cell.training.backend}")
    if cell.training.cuda_graph != "none":  # whose own memory is not modelled
        kinds.add("CUDA graphs")
    return frozenset(kinds)
