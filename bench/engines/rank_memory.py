"""A rank's memory log on a card: peaks in blocks of its caching allocator at each step; whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.engines.plan import RankClass
from spbench.bench.meters.allocator import MIB, OutOfMemory, replay
from spbench.bench.meters.memory import MemoryLog, Peak


@dataclass(frozen=True)
class Failure:
    """Where a rank runs out of memory.

    Attributes:
        step: from 1; 0 is set-up.
        phase: of the step; "" in set-up.
        error: the request that has no room.
    """

    step: int
    phase: str
    error: OutOfMemory

    def reason(self, ranks: RankClass) -> str:
        """A line for a result row.

        Args:
            ranks: the class of the rank.
        """
        error, alike = self.error, len(ranks.ranks)
        where = f"{self.phase} of step {self.step}" if self.step else "set-up"
        who = f"rank {ranks.first}" + (f", one of {alike} alike" if alike > 1 else "")
        stage = f" (stage {ranks.stage.index})" if ranks.stage.count > 1 else ""
        return (
            f"no room for {error.requested / MIB:.0f} MiB with {error.allocated / MIB:.0f} MiB allocated "
            f"and {error.reserved / MIB:.0f} MiB reserved, in {where} on {who}{stage}"
        )


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory at each traced step; of one that does not fit, as on a card without a limit.

    Attributes:
        peaks: of each step.
        reserved: the largest number of bytes reserved up to the end of each step.
        reserved_on_card: the same on the card, up to the last step or until it runs out of memory.
        failure: where it does not fit; None if it does.
    """

    peaks: Sequence[Peak]
    reserved: Sequence[int]
    reserved_on_card: int
    failure: Failure | None

    @classmethod
    def of(cls, log: MemoryLog, capacity: int | None) -> RankMemory:
        """Replay a log.

        Args:
            capacity: bytes of the card that tensors can have; None: no limit.
        """
        found = card = replay(log.sizes, log.events, capacity, log.step_ends)
        failure = None
        if card.out_of_memory is not None:
            at = card.events
            failure = Failure(log.step_of(at), log.phase_of(at), card.out_of_memory)
            found = replay(log.sizes, log.events, None, log.step_ends)
        return cls(log.peaks(found.blocks), found.reserved, card.peak_reserved, failure)

    @property
    def peak(self) -> Peak:
        """That of the step with the largest."""
        return max(self.peaks, key=lambda peak: peak.nbytes)

    def rows(self, ranks: RankClass) -> list[dict[str, Any]]:
        """As :attr:`Measurement.by_class`, of the class of the rank."""
        return [
            {
                "rank": ranks.first,
                "ranks": len(ranks.ranks),
                "stage": ranks.stage.index,
                "step": step,
                "status": "ok" if self.failure is None or step < self.failure.step else "oom",
                "peak_memory_bytes": peak.nbytes,
                "peak_phase": peak.phase,
                "peak_held": {name: nbytes for name, nbytes in peak.held.items() if nbytes},
                "reserved_memory_bytes": reserved,
                "allocated_bytes": peak.at_end,
            }
            for step, (peak, reserved) in enumerate(zip(self.peaks, self.reserved, strict=True), start=1)
        ]
