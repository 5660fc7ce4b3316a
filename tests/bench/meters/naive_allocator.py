"""The rules of torch's caching allocator written again, slowly and plainly (see ``test_allocator``)."""

from __future__ import annotations

from spbench.bench.meters.allocator import OutOfMemory

MIB = 2**20


class NaiveAllocator:
    """The allocator with nothing but lists: a segment is [(stream, small), [size, handle or None], ...] in
    order of addresses, and everything is found by looking at all of them."""

    def __init__(self, capacity: int | None):
        self.capacity = capacity
        self.segments: list[tuple[tuple[int, bool], list[list]]] = []

    @property
    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    @property
    def allocated(self) -> int:
        return sum(size for _, blocks in self.segments for size, handle in blocks if handle is not None)

    def malloc(self, nbytes: int, stream: int, handle: int) -> None:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        pool = (stream, small)
        if self._smallest(size, pool) is None:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.capacity is not None and self.reserved + segment > self.capacity:
                self.segments = [s for s in self.segments if len(s[1]) > 1 or s[1][0][1] is not None]
            if self.capacity is not None and self.reserved + segment > self.capacity:
                raise OutOfMemory(size, self.allocated, self.reserved)
            self.segments.append((pool, [[segment, None]]))
        found = self._smallest(size, pool)
        assert found is not None
        blocks, index = found
        remains = blocks[index][0] - size
        if remains >= (512 if small else MIB + 1):
            blocks[index : index + 1] = [[size, handle], [remains, None]]
        else:
            blocks[index][1] = handle

    def free(self, handle: int) -> None:
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == handle:
                    block[1] = None
            for left in range(len(blocks) - 2, -1, -1):
                if blocks[left][1] is None and blocks[left + 1][1] is None:
                    blocks[left][0] += blocks.pop(left + 1)[0]

    def _smallest(self, size: int, pool: tuple[int, bool]) -> tuple[list[list], int] | None:
        free = [
            (block[0], s, i)
            for s, (kind, blocks) in enumerate(self.segments)
            for i, block in enumerate(blocks)
            if kind == pool and block[1] is None and block[0] >= size
        ]
        return (self.segments[min(free)[1]][1], min(free)[2]) if free else None
