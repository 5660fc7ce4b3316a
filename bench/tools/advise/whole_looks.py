"""The end of a search: what is named is traced whole, without the memory switches that spare memory makes
needless; and the prices of the named layout's settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from spbench.bench.cell import Cell
from spbench.bench.tools.advise.layouts import folds_anew
from spbench.bench.tools.advise.look import looks
from spbench.bench.tools.advise.looked_at import LookedAt
from spbench.bench.tools.advise.ranking import NAMED, TOSS, Seen, ranked, simpler
from spbench.bench.tools.advise.single_changes import other_settings, without_switches
from spbench.bench.tools.advise.switch_prices import Price

#: so many of the fastest are traced whole, named or not
_WHOLE = 2
#: stages of a pipeline up to which other settings are priced: with more, each takes as long as a tenth of a
#: search
_FEW_STAGES = 4


class WholeLooks:
    """Whole looks at the best of what a search has looked at.

    Args:
        so_far: that; what is better is put into it.
    """

    def __init__(self, so_far: LookedAt):
        self.so_far, self.question = so_far, so_far.question
        #: by key, single changes of the best; None: it cannot be run
        self._beside: dict[str, Seen | None] = {}

    def run(self) -> None:
        """Trace what is named, and what that is set beside, until all of it is traced whole; and leave out
        what spare memory makes needless."""
        while True:
            if cells := [*{seen.cell.key: seen.cell for seen in self._compared() if not seen.exact}.values()]:
                text = f"tracing {len(cells)} of the best with all layers"
                self.so_far.behind.expect(text, len(cells) + 3 * NAMED)
                self.so_far.looked_at(cells, "all_layers")
            elif not self._lighten():
                return

    def _compared(self) -> list[Seen]:
        """The best two, those that are named, what is simpler than the first of these, the best of the next
        strategy, and of a model with experts the fastest that does not fold."""
        if not (best := self.so_far.best_layouts()):
            return []
        first, *_ = named = ranked(best)[:NAMED]
        others = (s for s in self.so_far.best_strategies() if s.cell.strategy != first.cell.strategy)
        unfolded = (seen for seen in best if not folds_anew(seen.cell.sizes.by_axis))
        return [*best[:_WHOLE], *named, *simpler(best, first), *islice(others, 1), *islice(unfolded, 1)]

    def _lighten(self) -> bool:
        """Look at the named layouts without one of their memory switches each, and take for better what
        leaves enough of a card free and takes no longer; returns whether there was any to look at."""
        lighter: dict[str, tuple[Seen, Cell]] = {}
        left = 0
        own = self.so_far.result.own  # is asked about as it is
        for seen in (each for each in ranked(self.so_far.best_layouts())[:NAMED] if each is not own):
            cells = without_switches(self.question, seen.cell).values()
            if new := [each for each in cells if each.key not in self._beside]:
                lighter[new[0].key], left = (seen, new[0]), left + len(new)
        self.so_far.behind.expect("the best without memory switches", left + NAMED)
        known = self.so_far.seen
        for other in filter(None, self._looked_at([cell for _, cell in lighter.values()])):
            heavier, _ = lighter[other.cell.key]
            as_fast = other.fits and other.step_s <= TOSS * heavier.step_s and self.question.runs(other.cell)
            if as_fast and (not other.is_full or other.peak <= heavier.peak):
                known[other.cell.key] = other
            elif other.cell.key in known and not known[other.cell.key].exact:
                del known[other.cell.key]  # few layers said something else
        return bool(lighter)

    def _looked_at(self, cells: Sequence[Cell]) -> list[Seen | None]:
        """Whole looks at cells, which are no part of the search."""
        known = {key: seen for key, seen in self.so_far.seen.items() if seen.exact}
        self._beside |= {cell.key: known[cell.key] for cell in cells if cell.key in known}
        new = [cell for cell in cells if cell.key not in self._beside]
        for cell, outcome in looks(self.so_far.asking, new, "all_layers", self.so_far.behind.ended):
            seen = Seen(cell, outcome, "all_layers")
            self._beside[cell.key] = None if outcome.status == "unsupported" else seen
        return [self._beside[cell.key] for cell in cells]

    def prices(self, layout: Seen) -> list[Price]:
        """What each memory switch of a layout costs, and each other setting that it could have; those of a
        layout of many stages are left out, as is what cannot be run."""
        cell = layout.cell
        switches = without_switches(self.question, cell)
        others = other_settings(self.question, cell) if cell.sizes.pp <= _FEW_STAGES else {}
        changes = [
            *((*each, True) for each in switches.items()),
            *((*each, False) for each in others.items()),
        ]
        self.so_far.behind.expect("what its settings cost", len(changes))
        seen = self._looked_at([each for _, each, _ in changes])
        return [
            Price(settings, used, layout, other)
            for (settings, _, used), other in zip(changes, seen, strict=True)
            if other is not None
        ]
