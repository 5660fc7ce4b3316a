"""The layout of Megatron-Core's contiguous buffers: where each parameter lies, and in which bucket.

The source is core/distributed/param_and_grad_buffer.py, and core/optimizer/distrib_optimizer.py where the
optimizer is sharded. All numbers count elements. Parameters lie in the reverse order of their registration,
in which backward reaches them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: elements to a multiple of which a parameter's start is padded in a sharded buffer
PARAMETER_MULTIPLE = 64
#: elements to a multiple of which, and of the ranks, a bucket's end is padded (256 bytes, for cuBLAS)
BUCKET_MULTIPLE = 128
#: elements to a multiple of which the end is padded too, if buckets suit the bandwidth of NCCL's rings
HIGH_BANDWIDTH_MULTIPLE = 2**16


@dataclass(frozen=True)
class BucketLayout:
    """A bucket, from ``start`` to ``end`` of its buffer.

    Attributes:
        members: the indices of the bucket's parameters in the argument of :func:`laid_out`, in the order of
            the buffer.
        starts: the element of the buffer at which each member starts.
    """

    start: int
    end: int
    members: tuple[int, ...]
    starts: tuple[int, ...]

    def shard(self, rank: int, ranks: int) -> tuple[int, int]:
        """(start, end) in the buffer of one rank's part of the bucket, which ``ranks`` ranks share evenly."""
        each = (self.end - self.start) // ranks
        return self.start + rank * each, self.start + (rank + 1) * each


@dataclass(frozen=True)
class Sharding:
    """Ranks that share every bucket evenly; ``high_bandwidth``: pad buckets for NCCL's bus bandwidth."""

    ranks: int
    high_bandwidth: bool = False

    def padded_start(self, elements: int) -> int:
        """The first element, from ``elements`` on, at which a parameter may start."""
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
    """The layouts of a buffer's buckets, in the order of the buffer.

    Args:
        elements: number of elements of each parameter, in the order of registration.
        alone: for each parameter, whether it has a bucket of its own in a sharded buffer. A tied embedding
            has one, so that its two copies are cut alike.
        full_at: elements at which a bucket is full; None: there is one bucket.
        sharding: how ranks share buckets; None: buckets are neither sharded nor padded.
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
