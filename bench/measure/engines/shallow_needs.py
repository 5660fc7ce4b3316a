"""What a cell needs of its card and of its host, from traces of few layers at the very size that is asked.

Where each size runs a program of its own (a longer sequence has more tiles), no other size says what one
needs; two traces of few layers do (:class:`PeakModel`), at a fifth of what a whole one costs. They do not say
what the allocator loses between blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.extrapolate import DEPTHS, PeakModel
from spbench.bench.measure.engines.host_memory import host_peaks, part_of_host
from spbench.bench.measure.engines.traces import Trace


class ShallowNeeds:
    """Needs by size.

    Args:
        cell: of which sizes are asked; all of its ranks are taken to hold as much on hosts as the traced.
        trace: gives the trace of (size, layers).
        layers: of the whole model's stage, more than :data:`DEPTHS`.
        capacity: bytes of the card that tensors can have.
    """

    def __init__(self, cell: Cell, trace: Callable[[int, int], Trace], layers: int, capacity: int):
        self._cell, self._trace, self._layers, self._capacity = cell, cache(trace), layers, capacity
        self.part = cache(self._part)

    def _part(self, size: int) -> float:
        """The need as a part of what there is, of the card or of the host, whichever is larger."""
        model = PeakModel(lambda x, depth: self._trace(x, depth or 0).memory, [size], self._layers)
        of_card = model(size) / self._capacity
        low, high = (host_peaks(self._trace(size, depth).host_memory)[-1] for depth in DEPTHS)
        on_host = low + (high - low) * (self._layers - DEPTHS[0])
        return max(of_card, part_of_host(self._cell, on_host))

    def last_that_fits(self, low: int, high: int, most: float = 1.0) -> int:
        """The last size from ``low`` on, and below ``high``, of which the need is no more than ``most``;
        ``low`` if there is none. Needs of cards grow nearly in a line with the size, which says where to
        look; those of hosts in steps, so every third look is in the middle."""
        known = {0: 0.0}
        while high - low > 1:
            near = [max(n for n in known if n <= low), *sorted(n for n in known if n > low)[:1]]
            if len(near) == 1:
                near = sorted(known)[-2:]
            if len(near) == 1 or len(known) % 3 == 0:
                at = (low + high) // 2
            else:
                a, b = near
                slope = (known[b] - known[a]) / (b - a)
                at = a + int((most - known[a]) / slope) if slope > 0 else high - 1
            at = max(low + 1, min(high - 1, at))
            known[at] = self.part(at)
            if known[at] <= most:
                low = at
            else:
                high = at
        return low
