"""What a search has found: cells that were traced, what became of all layouts, and the order in which the
best are named: those that tie with the fastest, the simplest first, and then the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure import FITS, NO, Certainty, certainty, packaged_model
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose.fit_verdict import CardMemory, card_memory
from spbench.bench.tools.choose.layouts import Refused, things_to_set
from spbench.bench.tools.choose.look import NEEDED, Depth
from spbench.impls.models.model import model_preset

#: layouts that are named
NAMED = 5
#: the share of a card that a layout should leave free
SPARE = 0.05
#: of matmuls, what a scalar that was fitted to a few cells charges for blocks of wider matrices
IN_BLOCKS = "in_blocks_s"
#: settings that make the same layout faster by less are not worth setting: of measured pairs as close as that
#: hardly half were in the simulated order
TOSS = 1.02


@dataclass
class Seen:
    """A cell that was traced, with the ``outcome`` of the closest look so far, at a ``depth``."""

    cell: Cell
    outcome: Outcome
    depth: Depth

    @property
    def measured(self) -> Mapping[str, Any]:
        """The measurement, as rows have it."""
        return self.outcome.measurement

    @property
    def fits(self) -> bool:
        """Whether it fits its card."""
        return self.outcome.status == "ok"

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        seconds: float = self.measured["step_time_s"]
        return seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of what a step is made of, by name."""
        return {**self.measured["breakdown"], **self.measured["parts"]}

    @property
    def uncharged_s(self) -> float:
        """Seconds of a step without what a fitted scalar charges for blocks."""
        return self.step_s - self.parts.get(IN_BLOCKS, 0.0)

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank at its peak."""
        nbytes: int = self.measured["peak_memory_bytes"]
        return nbytes

    @property
    def memory(self) -> CardMemory:
        """What a card must have for it; of one that was traced with few layers, about."""
        needed = self.measured.get("meters", {}).get(NEEDED, {})
        return card_memory(self.cell, self.measured, needed.get("tensors_bytes", self.peak))

    @property
    def is_full(self) -> bool:
        """Whether it leaves too little of its card to be sure that it fits (docs/trust.md)."""
        return self.memory.spare_bytes < SPARE * self.memory.card_bytes

    @property
    def certainty(self) -> Certainty:
        """How sure it is that it fits; see :mod:`measure.trust.fit_certainty`."""
        return (self.fits and certainty(self.cell, self.measured)) or Certainty(FITS if self.fits else NO)

    @property
    def exact(self) -> bool:
        """Whether all of it was traced, as `spbench run` does, and not only few layers."""
        return self.depth == "all_layers"

    def __str__(self) -> str:
        return f"{self.cell.strategy} {self.cell.mesh_text}"


@dataclass
class SearchResult:
    """What a search found.

    Attributes:
        best: layouts that fit, the fastest first, of each strategy and mesh one; the first two and those
            that are named are traced whole.
        of_strategies: the best of each strategy that fits, the fastest first.
        own: of the layout that a job has already, traced whole; None: there is none, or it cannot be traced.
        nearest: where nothing fits, what needs least; None: something fits, or nothing could be traced.
        counts: what became of how many layouts.
        refused: why which layouts cannot be.
        traced: every look.
        same: strategies, by those whose steps are the same.
        impossible: why there is no layout at all; "" if there is one.
    """

    best: list[Seen] = field(default_factory=list)
    of_strategies: list[Seen] = field(default_factory=list)
    own: Seen | None = None
    nearest: Seen | None = None
    counts: Counter[str] = field(default_factory=Counter)
    refused: Refused = field(default_factory=Refused)
    traced: list[Seen] = field(default_factory=list)
    same: Mapping[str, str] = field(default_factory=dict)
    impossible: str = ""


def has_experts(cell: Cell) -> bool:
    """Whether its model has routed experts."""
    return bool(getattr(model_preset(*cell.model_arguments), "experts", 0))


def tie_limit(best: Sequence[Seen]) -> float:
    """The ratio to the shortest time up to which times are a tie; 1.0: nothing fits.

    Args:
        best: the fastest first.
    """
    return packaged_model().tie(best[0].measured["rates"]) if best else 1.0


def is_tie(seen: Seen, best: Sequence[Seen]) -> bool:
    """Whether its time differs from the shortest by less than the errors of two layouts do, with what a
    fitted scalar charges for blocks or without it: that was fitted where it is little."""
    fastest, limit = best[0], tie_limit(best)
    return seen.step_s <= fastest.step_s * limit or seen.uncharged_s <= fastest.uncharged_s * limit


def ranked(best: Sequence[Seen]) -> list[Seen]:
    """Layouts that fit, given the fastest first, in the order in which they are named: no tie stands before
    one that is simpler."""

    def place(seen: Seen) -> tuple[bool, tuple[int, ...], float]:
        tie = is_tie(seen, best)
        return not tie, complexity(seen.cell) if tie else (), seen.step_s

    return sorted(best, key=place)


def best_of(
    fitting: Sequence[Seen], kind: Callable[[Cell], Hashable], seconds: Callable[[Seen], float]
) -> list[Seen]:
    """The fastest of each kind of cells that fits, or the simplest of those that are as fast but for a toss;
    the fastest first.

    Args:
        fitting: the fastest first.
        seconds: of a step.
    """
    of_kinds: dict[Hashable, list[Seen]] = {}
    for seen in fitting:
        of_kinds.setdefault(kind(seen.cell), []).append(seen)
    best = []
    for alike in of_kinds.values():
        as_fast = [each for each in alike if seconds(each) <= TOSS * seconds(alike[0])]
        best.append(min(as_fast, key=lambda each: complexity(each.cell)))
    return sorted(best, key=seconds)


def stands_for(own: Seen, seen: Seen) -> bool:
    """Whether a job's own layout is another one but for settings by which that is hardly faster."""

    def kind(cell: Cell) -> tuple[Any, ...]:
        return cell.strategy, cell.mesh_text, cell.training.backend, cell.training.micro_batches

    return own.fits and kind(own.cell) == kind(seen.cell) and own.step_s <= TOSS * seen.step_s


def simpler(best: Sequence[Seen], named: Seen) -> list[Seen]:
    """The layouts that fit and are simpler than a named one, and than all that are faster: things to set up
    count before axes.

    Args:
        best: the fastest first.
    """
    simpler_ones, most = list[Seen](), complexity(named.cell)[:2]
    for seen in best:
        if (shape := complexity(seen.cell)[:2]) < most:
            simpler_ones.append(seen)
            most = shape
    return simpler_ones


def complexity(cell: Cell) -> tuple[int, ...]:
    """How much there is to set up: strategies and memory switches, axes of several ranks, runs of layers a
    stage, settings."""
    options = cell.training.backend_options
    things = things_to_set(cell.strategy, cell.model_options, options)
    axes = sum(n > 1 for n in cell.sizes.by_axis.values())
    settings = len(cell.model_options) + len(cell.strategy_options) + len(options)
    return things, axes, cell.training.virtual_stages, settings + (cell.mesh is not None)
