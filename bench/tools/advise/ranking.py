"""The order in which layouts are named: those that tie with the fastest, the simplest first, and then the
others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.bands import packaged_model
from spbench.bench.tools.advise.search_findings import Seen
from spbench.impls.strategies.nesting import PLUS

#: layouts that are named
NAMED = 5
#: of products, what a scalar that was fitted to a few cells charges for blocks of wider matrices
IN_BLOCKS = "in_blocks_s"
#: settings that make the same layout faster by less are not worth setting: of measured pairs as close as that
#: hardly half were in the simulated order
TOSS = 1.02


def tie_limit(best: Sequence[Seen]) -> float:
    """The ratio to the shortest time up to which times are a tie; 1.0: nothing fits.

    Args:
        best: the fastest first.
    """
    return packaged_model().tie(best[0].outcome.measurement["rates"]) if best else 1.0


def is_tie(seen: Seen, best: Sequence[Seen]) -> bool:
    """Whether its time differs from the shortest by less than the errors of two layouts do, with what a
    fitted scalar charges for blocks or without it: that was fitted where it is little."""
    fastest, limit = best[0], tie_limit(best)
    return seen.step_s <= fastest.step_s * limit or uncharged_s(seen) <= uncharged_s(fastest) * limit


def ranked(best: Sequence[Seen]) -> list[Seen]:
    """Layouts that fit, given the fastest first, in the order in which they are named: no tie stands before
    one that is simpler."""
    ties = [seen for seen in best if is_tie(seen, best)]
    others = [seen for seen in best if not is_tie(seen, best)]
    by_step = sorted(others, key=lambda seen: seen.step_s)
    return [*sorted(ties, key=lambda seen: (complexity(seen.cell), seen.step_s)), *by_step]


def complexity(cell: Cell) -> tuple[int, ...]:
    """How much there is to set up: strategies, axes of several ranks, runs of layers a stage, settings."""
    strategies = 0 if cell.strategy == "single" else len(cell.strategy.split(PLUS))
    axes = sum(n > 1 for n in cell.sizes.by_axis.values())
    settings = len(cell.model_options) + len(cell.strategy_options) + len(cell.training.backend_options)
    return strategies, axes, cell.training.virtual_stages, settings + (cell.mesh is not None)


def parts_of(seen: Seen) -> dict[str, Any]:
    """Seconds of what a step is made of, by name."""
    measured = seen.outcome.measurement
    return {**measured["breakdown"], **measured["parts"]}


def uncharged_s(seen: Seen) -> float:
    """Seconds of a step without what a fitted scalar charges for blocks."""
    return seen.step_s - float(parts_of(seen).get(IN_BLOCKS, 0.0))
