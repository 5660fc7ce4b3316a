"""Where parameters lie in a contiguous buffer of Megatron-Core, and in which of its buckets.

The source is core/distributed/param_and_grad_buffer.py, and core/optimizer/distrib_optimizer.py where the
optimizer is sharded. All numbers count elements. Parameters lie in the reverse order of their registration,
in which backward reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: elements to a multiple of which a parameter's start is padded in a sharded buffer
PARAMETER_MULTIPLE = 64
#: a bucket's end is padded to a multiple of the ranks and of this (cuBLAS' alignment of 256 bytes in 16 bits)
BUCKET_MULTIPLE = 128
#: and of this, where buckets are padded for the bandwidth of NCCL's rings
HIGH_BANDWIDTH_MULTIPLE = 2**16


@dataclass(frozen=True)
class BucketLayout:
    """A bucket, from ``start`` to ``end`` of its buffer.

    Attributes:
        members: the indices of its parameters in the list given to :func:`laid_out`, in the order in which
            they lie.
        starts: where each of them starts in the buffer.
    """

    start: int
    end: int
    members: tuple[int, ...]
    starts: tuple[int, ...]

    def shard(self, rank: int, ranks: int) -> tuple[int, int]:
        """Start and end, in the buffer, of one rank's part of the bucket; ``ranks`` share it evenly."""
        each = (self.end - self.start) // ranks
        return self.start + rank * each, self.start + (rank + 1) * each


@dataclass(frozen=True)
class Sharding:
    """Ranks that share every bucket evenly; ``high_bandwidth``: pad buckets for NCCL's bus bandwidth."""

    ranks: int
    high_bandwidth: bool = False

    def padded_start(self, elements: int) -> int:
        """The first place, from ``elements`` on, at which a parameter may start."""
        return _multiple(elements, PARAMETER_MULTIPLE)

    def padded_end(self, elements: int) -> int:
        """The end of a bucket that is filled to ``elements``, with its padding."""
        others = (HIGH_BANDWIDTH_MULTIPLE,) if self.high_bandwidth else ()
        return _multiple(elements, math.lcm(self.ranks, BUCKET_MULTIPLE, *others))


def laid_out(
    elements: Sequence[int],
    alone: Sequence[bool],
    full_at: int | None,
    sharding: Sharding | None,
) -> list[BucketLayout]:
    """The buckets of a buffer, in the order in which they lie.

    Args:
        elements: of each parameter, in the order of registration.
        alone: for each parameter, whether it has a bucket of its own in a sharded buffer. A tied embedding
            has, so that its two copies are cut alike.
        full_at: elements at which a bucket is full; None: there is one bucket.
        sharding: of the buckets over ranks; None: they are not sharded, and nothing is padded.
    """
    buckets: list[BucketLayout] = []
    members: list[int] = []
    starts: list[int] = []
    first = end = 0

    def close() -> None:
        nonlocal first, end
        end = end if sharding is None else sharding.padded_end(end)
        buckets.append(BucketLayout(first, end, tuple(members), tuple(starts)))
        members.clear()
        starts.clear()
        first = end

    for number in reversed(range(len(elements))):
        own = sharding is not None and alone[number]
        start = end if sharding is None else sharding.padded_start(end)
        if own and members:
            end = start
            close()
            start = end
        members.append(number)
        starts.append(start)
        end = start + elements[number]
        if own or (full_at is not None and end - first >= full_at):
            close()
    if members:
        close()
    return buckets


def _multiple(elements: int, of: int) -> int:
    return -(-elements // of) * of
