"""Attention in a sliding window whose keys lie on this rank and on a few before it: a halo of window - 1
positions, where each rank has a contiguous chunk.

Rank r needs the last rows of chunks r-1, r-2, ... (:func:`halo_rows`), and no other rank's keys. Each owner
sends these rows itself, forward and again backward; each rank returns the gradients of received rows to their
owner, in at least float32. So in a window of W positions a rank sends 2 (W - 1) B G A elements of keys and
values forward, as many backward, and as many of gradients; the smaller of W - 1 and (N - 1) L/N counts. All
ranks send alike: the ring stays closed, and the first ranks ignore the rows that they receive from the last.
In an open chain the rank that sends most would send no less.

In a ring (:class:`PassingHalo`), queries attend to each chunk's keys while the next rows are on their way. In
a gather (:class:`GatheredHalo`), all rows arrive first, for one call of the kernel.

:class:`KeyValueRows` lays out the keys and values of several positions in one message.

Shape letters: G heads of keys and values, D features of a key, A of a value, both A but in latent attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import Ring
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.layout import Site, key_value_size, runs_again
from spbench.impls.rings import exchange
from spbench.impls.strategies.blockwise import Block, BlockwiseBackward, KeyBlocks
from spbench.impls.strategies.meetings import ALL, Meetings, halo_rows
from spbench.impls.traffic import Traffic


def halo_of_site(site: Site, size: int, placement: str) -> tuple[int, ...] | None:
    """The number of rows of each chunk of the halo (:attr:`Meetings.halo`) at a site of attention among
    ``size`` ranks; None: the site has no halo."""
    if "window" not in site.dims or placement != "contiguous":
        return None
    return halo_rows(site.dims["window"], site.dims["L"] // size, size)


def halo_traffic(site: Site, halo: tuple[int, ...], element_bytes: int) -> Iterator[Traffic]:
    """The messages of a rank for a site of attention, given the rows of each chunk of its halo."""
    d = site.dims
    row = d["B"] * d.get("G", d["Z"]) * key_value_size(d)
    for phase in ["forward", *(["backward"] if runs_again(site) else []), "backward"]:
        for rows in halo:
            yield Traffic(phase, "K and V of the halo", "send", site.count, rows * row * element_bytes)
    for rows in halo:
        sums = rows * row * max(4, element_bytes)
        yield Traffic("backward", "dK and dV of the halo", "send", site.count, sums)


class KeyValueRows(NamedTuple):
    """The layout of rows [.., G (D + A)]: the keys of all heads, then their values."""

    heads: int
    key_size: int
    value_size: int

    @classmethod
    def like(cls, k: Tensor, v: Tensor) -> Self:
        """The layout of rows for these k [.., G, L, D] and v [.., G, L, A]."""
        return cls(k.shape[1], k.shape[3], v.shape[3])

    def joined(self, k: Tensor, v: Tensor) -> Tensor:
        """New rows [.., G (D + A)] from k [.., G, D] and v [.., G, A]."""
        if self.key_size == self.value_size:
            return torch.stack((k, v), -3).flatten(-3)
        rows = k.new_empty(*k.shape[:-2], self.heads * (self.key_size + self.value_size))
        for view, x in zip(self.separate(rows), (k, v), strict=True):
            view.copy_(x)
        return rows

    def separate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [.., G, D] and values [.., G, A] as views of rows."""
        k, v = rows.split([self.heads * self.key_size, self.heads * self.value_size], -1)
        return k.unflatten(-1, (self.heads, -1)), v.unflatten(-1, (self.heads, -1))


class RowsByPosition(KeyValueRows):
    """The layout of messages [L/N, B, G (D + A)]. Positions are outermost, so the last rows of a message are
    a view without gaps, and messages one after another form one."""

    def message(self, k: Tensor, v: Tensor) -> Tensor:
        """The message [L/N, B, G (D + A)] of k and v [B, G, L/N, D or A]."""
        return self.joined(*(x.permute(2, 0, 1, 3) for x in (k, v)))

    def keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, G, rows, A] as views of rows of a message."""
        k, v = (x.permute(1, 2, 0, 3) for x in self.separate(rows))
        return k, v

    def fill(self, rows: Tensor, d_keys: Tensor, d_values: Tensor) -> None:
        """Write gradients [B, G, rows, A] of keys and values into rows of a message."""
        for into, x in zip(self.separate(rows), (d_keys, d_values), strict=True):
            into.copy_(x.permute(2, 0, 1, 3))


@dataclass(frozen=True)
class PassingHalo(KeyBlocks):
    """A block of the rank's own keys, then one of each chunk of the halo, received block by block."""

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        layout = RowsByPosition.like(k, v)
        for back, rows in _passing(layout.message(k, v), self.group, self.meetings):
            if (met := _met(self.meetings, back, len(rows))) is not None:
                mine, theirs, seen = met
                yield mine, *layout.keys_and_values(rows[theirs]), seen

    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        home, own, layout = Ring(self.group), k, RowsByPosition.like(k, v)
        for back, rows in _passing(layout.message(k, v), self.group, self.meetings):
            gradients = rows.new_zeros(rows.shape, dtype=state_dtype(k.dtype))
            if (met := _met(self.meetings, back, len(rows))) is not None:
                mine, theirs, seen = met
                block = layout.keys_and_values(rows[theirs])
                layout.fill(gradients[theirs], *backward.of_block(mine, *block, seen))
                del block
            if back == 0:
                own = gradients
                continue
            if back > 1:
                _add(own, *home.finish())
            home.start(gradients, to=-back)
        if self.meetings.halo:
            _add(own, *home.finish())
        return layout.keys_and_values(own)


def _passing(own: Tensor, group: dist.ProcessGroup, meetings: Meetings) -> Iterator[tuple[int, Tensor]]:
    """Yields (number of chunks back, rows): this rank's rows, then those of each chunk of the halo, while the
    next rows are on their way."""
    ring, rows = Ring(group), own
    halo = meetings.halo or ()
    for back in range(len(halo) + 1):
        if back < len(halo):
            ring.start(own[-halo[back] :], to=back + 1)
        yield back, rows
        if back < len(halo):
            (rows,) = ring.finish()


def _met(meetings: Meetings, back: int, rows: int) -> Any:
    """:meth:`Meetings.of` for the rank ``back`` chunks before, with keys counted in its last ``rows``."""
    met = meetings.of(meetings.before(back))
    if met is None:
        return None
    mine, theirs, seen = met
    missing = meetings.length - rows
    return mine, slice(theirs.start - missing, theirs.stop - missing), seen


def _add(own: Tensor, gradients: Tensor) -> None:
    """Add gradients of this rank's last rows, received from a later rank, to its ``own`` gradients."""
    own[-len(gradients) :].add_(gradients)


@dataclass(frozen=True)
class GatheredHalo(KeyBlocks):
    """One block of keys: those of the halo, then the rank's own."""

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        layout = RowsByPosition.like(k, v)
        rows = _with_halo(layout.message(k, v), self.group, self.meetings)
        yield ALL, *layout.keys_and_values(rows), self.meetings.of_halo()

    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        meetings, layout = self.meetings, RowsByPosition.like(k, v)
        rows = _with_halo(layout.message(k, v), self.group, meetings)
        gradients = rows.new_empty(rows.shape, dtype=state_dtype(k.dtype))
        layout.fill(gradients, *backward.of_block(ALL, *layout.keys_and_values(rows), meetings.of_halo()))
        del rows
        *halo, own = _parts(gradients, meetings)
        arrived = [torch.empty_like(x) for x in halo]
        exchange(
            [(x, meetings.before(back)) for back, x in _backwards(halo)],
            [(x, meetings.before(-back)) for back, x in _backwards(arrived)],
            self.group,
        )
        for _, x in _backwards(arrived):
            _add(own, x)
        return layout.keys_and_values(own)


def _parts(rows: Tensor, meetings: Meetings) -> list[Tensor]:
    """Views of ``rows``: those of each chunk of the halo, the farthest first, and this rank's own last."""
    return list(rows.split([*reversed(meetings.halo or ()), meetings.length]))


def _backwards(halo: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The parts of a halo from the nearest to the farthest, as (number of chunks back, rows); ``halo`` has
    the farthest first."""
    return enumerate(reversed(halo), 1)


def _with_halo(own: Tensor, group: dist.ProcessGroup, meetings: Meetings) -> Tensor:
    """New rows: those received for the halo, the farthest first, then this rank's ``own``."""
    halo = meetings.halo or ()
    rows = own.new_empty(sum(halo) + len(own), *own.shape[1:])
    *parts, mine = _parts(rows, meetings)
    mine.copy_(own)
    exchange(
        [(own[-n:], meetings.before(-back)) for back, n in enumerate(halo, 1)],
        [(x, meetings.before(back)) for back, x in _backwards(parts)],
        group,
    )
    return rows
