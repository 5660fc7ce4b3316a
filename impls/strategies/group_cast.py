"""Context parallelism by group cast (MagiAttention, arXiv 2505.13211, section 4; its code,
magi_attention/comm and magi_attention/meta/solver/dispatch_solver.py).

Every rank holds all weights and L/N positions of every sequence, by default small chunks such that ranks have
equally many positions and almost equally many pairs of a query and a key ("by_work"). Before attention, each
rank sends its keys and values to the ranks whose queries see them, and to no others (group cast). Backward
casts them again, as in :mod:`spbench.impls.strategies.all_gather_kv`; then each rank returns the gradients of
the rows that it received, in at least float32, and their owner adds them up (group reduce).

A rank sends each row at most N - 1 times, as often as in a ring's all-gather. Under a causal mask it sends
fewer: zigzag three quarters on average, contiguous half; with short documents or a window almost none. Ranks
send and receive unlike amounts, so each rank is a program of its own.

MagiAttention casts in stages, and computes attention to the keys of one stage while those of the next are on
their way (section 4.3, multi-stage overlap); here option ``stages``.

Shape letters: R rows, one for each position, of keys and values of all heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.attended import Numbers, Ranges
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.layout import HEEDS_ALL, key_value_size, runs_again
from spbench.impls.rings import post
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.blockwise import Block, BlockwiseBackward, KeyBlocks, attention_to_blocks
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.halo import RowsByPosition
from spbench.impls.strategies.meetings import ALL, Meetings
from spbench.impls.strategies.needed_rows import NeededRows, rows_of_meetings, rows_of_site
from spbench.impls.strategies.placed_chunks import DocumentPlacementOptions, PlacedChunks
from spbench.impls.strategies.placements import BALANCED
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class GroupCastOptions(DocumentPlacementOptions):
    """Options of :class:`GroupCast`.

    Attributes:
        stages: 0: all keys arrive before attention, which is then one call of the kernel. From 1 on:
            attention to a rank's own keys first, then to the keys of the other ranks in this many parts, each
            while the next part is on its way.
    """

    placement: str = "by_work"
    stages: int = 0

    words = {"placement": ("contiguous", "zigzag", *BALANCED)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages < 0:
            raise ValueError(f"stages is 0 or more, not {self.stages}")

    def variants(self) -> Iterator[Mapping[str, Any]]:
        yield from super().variants()
        yield {"stages": 2}


@dataclass(frozen=True)
class CastKeys(KeyBlocks):
    """The keys and values that this rank's queries see, from the ranks that own them.

    A part of them has the rows of the owners that are some numbers of places before this rank; 0 places
    before is this rank itself.
    """

    stages: int

    @cached_property
    def needed(self) -> NeededRows:
        """The rows that each rank needs of each other one."""
        return rows_of_meetings(self.meetings)

    @cached_property
    def parts(self) -> list[range]:
        """For each part, how many places before this rank its owners are: all ranks at once without stages,
        else this rank, then the others, nearest first."""
        size = self.meetings.size
        if not self.stages:
            return [range(size)]
        edges = [1 + (size - 1) * n // self.stages for n in range(self.stages + 1)]
        return [range(1), *(range(first, end) for first, end in pairwise(edges) if first < end)]

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        layout = RowsByPosition.like(k, v)
        for part, rows in self._arriving(layout.message(k, v)):
            if len(rows):
                yield ALL, *layout.keys_and_values(rows), self._seen(part)

    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        layout, returning = RowsByPosition.like(k, v), _Returning()
        own = k  # replaced by the first part's gradients, among which are those of this rank's rows
        for part, rows in self._arriving(layout.message(k, v)):
            gradients = rows.new_empty(rows.shape, dtype=state_dtype(k.dtype))
            if len(rows):
                of_block = backward.of_block(ALL, *layout.keys_and_values(rows), self._seen(part))
                layout.fill(gradients, *of_block)
                del of_block
            del rows
            if 0 in part:
                own = self._by_owner(gradients, part)[self.meetings.rank]
            returning.add_to(own)
            returning = self._give_back(gradients, part)
            del gradients
        returning.add_to(own)
        return layout.keys_and_values(own)

    def _owners(self, part: range) -> tuple[int, ...]:
        """The owners of a part's rows, in the order in which the rows lie in memory."""
        return tuple(sorted(self.meetings.before(each) for each in part))

    def _seen(self, part: range) -> Ranges:
        return self.needed.ranges(self.meetings.rank, self._owners(part))

    def _by_owner(self, rows: Tensor, part: range) -> dict[int, Tensor]:
        """Views of the rows [R, ...] of a part, by their owner."""
        owners = self._owners(part)
        counts = [self.needed.count(owner, self.meetings.rank) for owner in owners]
        return dict(zip(owners, rows.split(counts), strict=True))

    def _asking(self, part: range) -> list[tuple[int, Numbers]]:
        """(rank, runs of this rank's rows) for each other rank that needs rows of this rank in a part."""
        ranks = [self.meetings.before(-each) for each in part if each]
        asked = ((rank, self.needed.rows(self.meetings.rank, rank)) for rank in ranks)
        return [(rank, runs) for rank, runs in asked if len(runs)]

    def _arriving(self, own: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Yields (part, its rows [R, ...]), given this rank's rows ``own`` [L/N, ...], while the rows of the
        next part are on their way."""
        under_way = [self._cast(own, self.parts[0])]
        for part, following in zip_longest(self.parts, self.parts[1:]):
            arrived = [_arrived(*under_way.pop())]
            if following is not None:
                under_way.append(self._cast(own, following))
            yield part, arrived.pop()  # not held here, so that the receiver can free the rows

    def _cast(self, own: Tensor, part: range) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send and to receive the rows of a part; returns (memory for the rows, works)."""
        rank = self.meetings.rank
        if part == range(1):
            return own, []
        rows = own.new_empty(sum(self.needed.count(o, rank) for o in self._owners(part)), *own.shape[1:])
        received = self._by_owner(rows, part)
        if rank in received:
            received.pop(rank).copy_(own)
        sends = [(_taken(own, runs), to) for to, runs in self._asking(part)]
        return rows, post(sends, [(x, owner) for owner, x in received.items() if len(x)], self.group)

    def _give_back(self, gradients: Tensor, part: range) -> _Returning:
        """Begin to return the gradients of a part's rows to their owners."""
        asking = self._asking(part)
        parts = [gradients.new_empty(_count(runs), *gradients.shape[1:]) for _, runs in asking]
        sends = [(x, to) for to, x in self._by_owner(gradients, part).items() if to != self.meetings.rank]
        receives = [(x, rank) for x, (rank, _) in zip(parts, asking, strict=True)]
        works = post([(x, to) for x, to in sends if len(x)], receives, self.group)
        return _Returning(works, [(runs, x) for (_, runs), x in zip(asking, parts, strict=True)])


class _Returning(NamedTuple):
    """Gradients on their way to this rank: works, and (runs of the rank's rows, memory for gradients)."""

    works: Sequence[dist.Work] = ()
    parts: Sequence[tuple[Numbers, Tensor]] = ()

    def add_to(self, own: Tensor) -> None:
        """Wait for the gradients, and add them to those of this rank's rows [L/N, ...]."""
        for work in self.works:
            work.wait()
        for runs, x in self.parts:
            if len(runs) == 1:
                own[slice(*runs[0].tolist())].add_(x)
            else:
                own.index_add_(0, _index(runs, own), x)


def _arrived(rows: Tensor, works: Sequence[dist.Work]) -> Tensor:
    for work in works:
        work.wait()
    return rows


def _taken(own: Tensor, runs: Numbers) -> Tensor:
    """The rows of these runs: a view if there is one run."""
    return own[slice(*runs[0].tolist())] if len(runs) == 1 else own.index_select(0, _index(runs, own))


def _index(runs: Numbers, own: Tensor) -> Tensor:
    places = np.concatenate([np.arange(*run) for run in runs.tolist()])
    return torch.from_numpy(places).to(own.device)


def _count(runs: Numbers) -> int:
    return int((runs[:, 1] - runs[:, 0]).sum())


class GroupCast(PlacedChunks):
    """Sequence chunks whose keys and values go only to the ranks whose queries see them."""

    name = "group_cast"
    summary = "sequence chunks; keys and values go only to ranks that need them (MagiAttention's group cast)"
    source = "arXiv 2505.13211, section 4"
    searched = False  # the program of each rank would be traced, for each way to divide a sample
    meets = frozenset({"causal_attention"})
    heeds = HEEDS_ALL
    options_type = GroupCastOptions
    options: GroupCastOptions

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # each rank sends other bytes, to other ranks
        return [[rank] for rank in reversed(range(size))]

    def check_sizes(self, sites: Sequence[Site]) -> None:
        super().check_sizes(sites)
        if any("documents" in s.dims and s.attended is None for s in sites if s.kind in self.meets):
            raise Unsupported(
                f"{self.name} needs the documents' lengths, which the sites of this model lack",
                "set attended and packed of its sites, or use all_gather_kv",
            )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind not in self.meets or self.size == 1:
                continue
            d, others = site.dims, [rank for rank in range(self.size) if rank != self.rank]
            needed = rows_of_site(site, self.size, self.options.placement)
            row = d["B"] * d.get("G", d["Z"]) * key_value_size(d)
            sent = [n * row for rank in others if (n := needed.count(self.rank, rank))]
            for phase in ["forward", *(["backward"] if runs_again(site) else []), "backward"]:
                for elements in sent:
                    yield Traffic(phase, "K and V cast", "send", site.count, elements * element_bytes)
            precise = max(4, element_bytes)
            for elements in (n * row for rank in others if (n := needed.count(rank, self.rank))):
                yield Traffic("backward", "dK and dV returned", "send", site.count, elements * precise)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        assert self.group is not None
        return attention_to_blocks(q, k, v, CastKeys(self.group, meetings, self.options.stages), sinks)
