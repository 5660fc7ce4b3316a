"""Context parallelism by all-gather (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2;
Megatron-LM's ``cp_comm_type`` "all_gather").

Every rank holds all weights and L/N positions of every sequence. Before attention, one all-gather gives each
rank the keys and values of all positions, to which its own queries attend. Unlike in a ring, nothing is
computed meanwhile. Llama 3 accepts this wait, because keys and values have fewer heads than queries, and
masks of any kind become simple. Llama 3 and Megatron-LM place positions zigzag.

Backward gathers keys and values again, since keeping them would take N times a rank's own memory in every
layer. Each rank then has a part of the gradients of all keys and values. A reduce-scatter sums these parts;
or, as in torch's context parallelism (rotate method "allgather", torchtitan's default), the parts are summed
from rank to rank of a ring, as in :mod:`spbench.impls.strategies.ring_attention`.

Linear attention is refused, because its state of D x A numbers a head replaces all keys of a chunk. The
strategy that gathers these states is LASP-2 (arXiv 2502.07563).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import reduce_scatter_flat, start_all_gather
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.ranged_attention import Seen
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.layout import HEEDS_ALL, key_value_size, runs_again
from spbench.impls.strategies.base import Site
from spbench.impls.strategies.blockwise import Block, BlockwiseBackward, KeyBlocks, attention_to_blocks
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.halo import GatheredHalo, KeyValueRows, halo_of_site, halo_traffic
from spbench.impls.strategies.meetings import ALL, Meetings
from spbench.impls.strategies.placed_chunks import DocumentPlacementOptions, PlacedChunks
from spbench.impls.strategies.ring_attention import attention_gradients_round
from spbench.impls.traffic import Traffic

#: (owners, queries, keys, seen): the ranks that own the keys, and a meeting that they share
#: (:meth:`Meetings.of`)
JointMeeting = tuple[slice, slice, slice, Seen]


def joint_meetings(meetings: Meetings) -> Iterator[JointMeeting]:
    """Yields which of this rank's queries see which keys of each rank, one meeting for each call of the
    kernel. All queries see the first.

    Without a mask there is one call, and likewise with packed documents. Under a causal mask the rank's own
    keys, all keys of lower ranks and all of higher ranks take one call each: 2 calls contiguous, 3 zigzag.
    Striped, the keys of every owner meet the queries along a diagonal, which takes N calls.
    """
    rank, size = meetings.rank, meetings.size
    if meetings.placement is None:
        yield slice(size), ALL, ALL, False
        return
    if not meetings.regular:
        owners, seen = meetings.of_all()
        yield slice(*owners), ALL, ALL, seen
        return
    for first, last in ((rank, rank + 1), (0, rank), (rank + 1, size)):
        met = meetings.of(first) if first < last else None
        if met is None:
            continue
        mine, theirs, causal = met
        if not causal or last - first == 1:
            yield slice(first, last), mine, theirs, causal
            continue
        for step in keyed_steps(last - first, lambda step: None):
            yield slice(first + step, first + step + 1), mine, theirs, causal


def gathered(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers k and v [B, Z, L/N, A] in one message; returns the rows of all ranks [N, L/N, B, Z (A +
    A)], laid out by :class:`KeyValueRows`. Positions are outermost, so several ranks' keys are one view."""
    rows = KeyValueRows.like(k, v).joined(*(x.permute(2, 0, 1, 3) for x in (k, v)))
    parts, arrival = start_all_gather(rows, group)
    arrival.wait()
    return parts


def _by_heads(rows: Tensor, layout: KeyValueRows) -> tuple[Tensor, Tensor]:
    """k and v [B, Z, keys, A] as views of rows [keys, B, Z (A + A)]."""
    k, v = (x.permute(1, 2, 0, 3) for x in layout.separate(rows))
    return k, v


def _keys_and_values(
    parts: Tensor, layout: KeyValueRows, owners: slice, theirs: slice
) -> tuple[Tensor, Tensor]:
    """k and v [B, Z, keys, A] of some ranks (``owners``), one after another, from :func:`gathered`'s rows."""
    return _by_heads(parts[owners, theirs].flatten(0, 1), layout)


def _block_of(parts: Tensor, layout: KeyValueRows, owner: int) -> Sequence[Tensor]:
    """k and v of one rank (``owner``), [B, L/N, Z, A] each, from :func:`gathered`'s rows."""
    return [x.transpose(0, 1) for x in layout.separate(parts[owner])]


def summed(gradients: Tensor, layout: KeyValueRows, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's k and v [B, Z, L/N, A]: a reduce-scatter sums ``gradients``, which each
    rank has for all keys and values, laid out as :func:`gathered` lays out its rows."""
    own = reduce_scatter_flat(gradients.flatten(), group).view(gradients.shape[1:])
    return _by_heads(own, layout)


@dataclass(frozen=True)
class AllGatherKVOptions(DocumentPlacementOptions):
    """Options of :class:`AllGatherKV`.

    Attributes:
        gradients: how the gradients of keys and values are summed: "reduce_scatter", over all ranks at once;
            "ring", from rank to rank, in N messages of 1/N of these gradients each.
    """

    gradients: str = "reduce_scatter"

    words = {**DocumentPlacementOptions.words, "gradients": ("reduce_scatter", "ring")}


@dataclass(frozen=True)
class GatheredKeys(KeyBlocks):
    """Keys and values of all ranks at once; ``way`` is the option ``gradients`` of :class:`AllGatherKV`."""

    way: str

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        parts, layout = gathered(k, v, self.group), KeyValueRows.like(k, v)
        for owners, mine, theirs, seen in joint_meetings(self.meetings):
            with self.meetings.work_on(owners.start or 0, joint=True):
                yield mine, *_keys_and_values(parts, layout, owners, theirs), seen

    def gradients(self, backward: BlockwiseBackward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts, layout = gathered(k, v, self.group), KeyValueRows.like(k, v)
        if self.way == "ring":
            everywhere = partial(_block_of, parts, layout)
            return attention_gradients_round(self.group, self.meetings, backward, k, v, everywhere)
        # In at least float32, as in ring_attention: in half precision a sum over N ranks is rounded up to N -
        # 1 times. Llama 3 sums gradients of what is used several times in float32 (section 3.3.2);
        # Megatron-LM (Transformer Engine) reduce-scatters them in the activations' dtype: in bf16 half as
        # much.
        gradients = parts.new_zeros(parts.shape, dtype=state_dtype(k.dtype))
        for owners, mine, theirs, seen in joint_meetings(self.meetings):
            with self.meetings.work_on(owners.start or 0, joint=True):
                of_block = backward.of_block(mine, *_keys_and_values(parts, layout, owners, theirs), seen)
                met = layout.separate(gradients[owners, theirs])  # no other meeting writes here
                for into, x in zip(met, of_block, strict=True):
                    into.copy_(x.permute(2, 0, 1, 3).unflatten(0, into.shape[:2]))
        del parts
        return summed(gradients, layout, self.group)


def _elements(site: Site) -> int:
    """The number of elements of all keys and values of a site of attention."""
    d = site.dims
    return d["B"] * d.get("G", d["Z"]) * d["L"] * key_value_size(d)


def gather_traffic(
    site: Site, element_bytes: int, run: int | None = None, *, sums: bool = True
) -> Iterator[Traffic]:
    """The messages of a rank that gathers all keys and values of a site of attention, and with ``sums``
    reduce-scatters their gradients; over all ranks, or over ``run`` of these."""
    elements = _elements(site)
    for phase in ["forward", *(["backward"] if runs_again(site) else []), "backward"]:
        yield Traffic(phase, "K and V", "all_gather", site.count, elements * element_bytes, run=run)
    if sums:
        precise = elements * max(4, element_bytes)  # in at least float32
        yield Traffic("backward", "dK and dV", "reduce_scatter", site.count, precise, run=run)


class AllGatherKV(PlacedChunks):
    """Sequence chunks whose queries attend to the gathered keys and values of all ranks."""

    name = "all_gather_kv"
    summary = "sequence chunks; keys and values are all-gathered (Llama 3's context parallelism)"
    source = "arXiv 2407.21783, section 3.3.2"
    meets = frozenset({"attention", "causal_attention", "full_attention"})
    heeds = HEEDS_ALL
    marks_work = True
    options_type = AllGatherKVOptions
    options: AllGatherKVOptions

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # The last rank has the largest peak too, with two exceptions. Of two ranks placed zigzag, rank 0
        # holds gradients of all keys of the other at once, rank 1 of half of them. With zigzag and gradients
        # round a ring, the last rank's peak lacks half a block for any number of ranks.
        return [[1], [0]] if size == 2 else super().roles(axis, size)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in as_sequences(sites, self.grid_dim):
            if site.kind not in self.meets:
                continue
            if (halo := halo_of_site(site, self.size, self.options.placement)) is not None:
                yield from halo_traffic(site, halo, element_bytes)
                continue
            yield from gather_traffic(site, element_bytes, sums=self.options.gradients == "reduce_scatter")
            if self.options.gradients == "ring" and self.size > 1:
                # N steps, so that the gradients end on the rank that owns the keys
                part = _elements(site) * max(4, element_bytes) // self.size
                yield Traffic("backward", "dK and dV ring", "send", site.count * self.size, part)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings, sinks: Tensor | None = None
    ) -> Tensor:
        assert self.group is not None
        if meetings.halo is not None:
            return attention_to_blocks(q, k, v, GatheredHalo(self.group, meetings), sinks)
        return attention_to_blocks(q, k, v, GatheredKeys(self.group, meetings, self.options.gradients), sinks)
