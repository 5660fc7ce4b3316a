"""The one number that decides whether a rank fits: what its card must have, beside what the card has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.usable_memory import exchange_memory_bytes


@dataclass(frozen=True)
class CardMemory:
    """Bytes of a card and what a rank needs of them.

    Attributes:
        card_bytes: all of the card's memory.
        tensors_bytes: the least that PyTorch's allocator must reserve to serve the rank.
        context_bytes: what the CUDA context takes; None: not known, and counted as none.
        nccl_bytes: what NCCL's buffers for all-to-alls take; None: not known, and counted as none.
    """

    card_bytes: int
    tensors_bytes: int
    context_bytes: int | None
    nccl_bytes: int | None

    @property
    def outside_bytes(self) -> int:
        """What is known to be taken outside PyTorch's allocator."""
        return (self.context_bytes or 0) + (self.nccl_bytes or 0)

    @property
    def total_bytes(self) -> int:
        """What the card must have: the number that decides."""
        return self.tensors_bytes + self.outside_bytes

    @property
    def spare_bytes(self) -> int:
        """What the card has beyond the total; negative: what is missing."""
        return self.card_bytes - self.total_bytes

    def record(self) -> dict[str, int]:
        """For programs: ``total_bytes``, ``card_bytes`` and ``spare_bytes``."""
        return {
            "total_bytes": self.total_bytes,
            "card_bytes": self.card_bytes,
            "spare_bytes": self.spare_bytes,
        }


def card_memory(cell: Cell, measurement: Mapping[str, Any], tensors_bytes: int) -> CardMemory:
    """The memory of a cell's cards beside what one of its ranks needs.

    Args:
        measurement: of the cell on a cluster with a limit; ``usable_memory_bytes`` is what tensors can have.
        tensors_bytes: the least that the allocator must reserve for the rank.
    """
    context: int | None = load_cluster(cell.cluster).device.memory_context_bytes.value
    nccl = exchange_memory_bytes(cell)
    usable: int = measurement["usable_memory_bytes"]
    return CardMemory(usable + (context or 0) + (nccl or 0), tensors_bytes, context, nccl)
