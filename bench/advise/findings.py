"""What a search has found: cells that were traced, and what became of all layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spbench.bench.advise.layouts import Refused
from spbench.bench.advise.looks import Depth
from spbench.bench.advise.prices import Price
from spbench.bench.cell import Cell
from spbench.bench.measurement import Outcome


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


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: that fit, the fastest first, the first two traced whole; of each strategy and mesh one.
        of_strategies: the best of each strategy that fits, the fastest first.
        nearest: where nothing fits, what needs least; None: something fits, or nothing could be traced.
        counts: what became of how many layouts.
        refused: why which layouts cannot be.
        traced: every look.
        impossible: why there is no layout at all; "" if there is one.
        prices: of the named layout's memory switches, and of those that it could have.
        by_kernel: of the named layout, the times by other attention kernels over its own.
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
