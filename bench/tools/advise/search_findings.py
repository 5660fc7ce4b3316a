"""What a search has found: cells that were traced, and what became of all layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spbench.bench.cell import Cell
from spbench.bench.measurement import Outcome
from spbench.bench.tools.advise.layouts import Refused
from spbench.bench.tools.advise.looks import NEEDED, Depth
from spbench.bench.tools.advise.switch_prices import Price


@dataclass
class Seen:
    """A cell that was traced.

    Attributes:
        outcome: of the closest look so far.
        depth: of it.
    """

    cell: Cell
    outcome: Outcome
    depth: Depth

    @property
    def fits(self) -> bool:
        """Whether it fits its card."""
        return self.outcome.status == "ok"

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        seconds: float = self.outcome.measurement["step_time_s"]
        return seconds

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank at its peak."""
        nbytes: int = self.outcome.measurement["peak_memory_bytes"]
        return nbytes

    @property
    def tensors_bytes(self) -> int:
        """The least that the allocator must reserve for the fullest rank; see :attr:`exact`."""
        needed = self.outcome.measurement.get("meters", {}).get(NEEDED, {})
        nbytes: int = needed.get("tensors_bytes", self.peak)
        return nbytes

    @property
    def exact(self) -> bool:
        """Whether all of its layers were traced, and not only few."""
        return bool(self.outcome.measurement.get("meters", {}).get(NEEDED, {}).get("exact"))


@dataclass(frozen=True)
class Untraced:
    """Layouts that were asked about and not traced.

    Attributes:
        layouts: how many strategies and meshes.
        slow: of these, the ones that may fit by the estimate; others need too much.
        least_s: the shortest estimated step of these; None: there are none.
        least_bytes: the smallest estimated peak of all.
    """

    layouts: int
    slow: int
    least_s: float | None
    least_bytes: float


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: that fit, the fastest first, of each strategy and mesh one; the first two and the one that is
            named first are traced whole.
        of_strategies: the best of each strategy that fits, the fastest first.
        nearest: where nothing fits, what needs least; None: something fits, or nothing could be traced.
        counts: what became of how many layouts.
        refused: why which layouts cannot be.
        traced: every look.
        impossible: why there is no layout at all; "" if there is one.
        prices: of the named layout's memory switches, and of those that it could have.
        by_kernel: of the named layout, the times by other attention kernels over its own.
        untraced: of the layouts that were asked about; None: each was traced, or nothing was asked.
    """

    best: list[Seen] = field(default_factory=list)
    of_strategies: list[Seen] = field(default_factory=list)
    nearest: Seen | None = None
    counts: Counter[str] = field(default_factory=Counter)
    refused: Refused = field(default_factory=Refused)
    traced: list[Seen] = field(default_factory=list)
    impossible: str = ""
    prices: list[Price] = field(default_factory=list)
    by_kernel: dict[str, float] = field(default_factory=dict)
    untraced: Untraced | None = None
