"""Fully Pipelined Distributed Transformer (FPDT, arXiv 2408.16978, section 4; DeepSpeed's "Ulysses-Offload",
deepspeed/sequence/fpdt_layer.py): Ulysses' all-to-alls and attention by chunks of the sequence, with keys and
values in the host's memory.

A rank has a part of each chunk of every sequence. For each chunk it projects queries, keys and values, swaps
them for whole positions of some heads as in :mod:`spbench.impls.strategies.ulysses`, attends with the chunk's
queries to the keys of the chunks so far, and swaps the output back. Queries, keys, values, outputs and hidden
states wait in pinned memory of the host. Keys and values of earlier chunks come back one after another while
the queries attend to the keys before (section 4.2, a double buffer); the logarithms of the denominators merge
their attention. The program waits for the device after each block, as DeepSpeed's does, so launches of a
block are not hidden behind the block before.

Backward loops over chunks of keys, whose gradients stay on the device, and for each over the chunks of later
queries, whose float32 gradients wait on the host in between (figure 7). After each chunk of keys,
the gradients of that chunk's queries, keys and values are complete and swapped back. The gradients of
the weights and of the chunk's hidden states follow.

The bytes equal those of Ulysses, and each chunk has messages of its own. FPDT also cuts MLP and loss in
chunks: in spbench an option of models does that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels.copy_stream import CopyStream, NoCopies
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.ranged_attention import Seen, attention_to_block_backward
from spbench.impls.kernels.sinks import sinks_gradient
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.layout import HEEDS_ALL, key_value_size
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.blockwise import Block, attend_blocks
from spbench.impls.strategies.head_sources import ALL, GivenHeads, HeadPart, HeadSource
from spbench.impls.strategies.sequence_chunks import chunk_of
from spbench.impls.strategies.ulysses import POSITIONS, Ulysses, UlyssesOptions
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class FPDTOptions(UlyssesOptions):
    """Options of :class:`FPDT`.

    Attributes:
        chunk: positions of a sequence in a chunk, over all ranks (DeepSpeed:
            ds_sequence_parallel_fpdt_chunk_size, 65536); the last chunk may be shorter. None: half of the
            sequence.
        offload: hold tensors that wait for other chunks and for backward on the host; else on the device.
    """

    chunk: int | None = None
    offload: bool = True

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yields the settings that a search for the fastest layout tries (:meth:`Options.searched`)."""
        yield {"chunk": 65536}

    def variants(self) -> Iterator[Mapping[str, Any]]:
        yield from super().variants()
        yield {"chunk": 9}  # with a shorter last chunk


class Row(NamedTuple):
    """The tensors of chunk ``number`` that a block of attention needs from the host; ``seen`` says which keys
    of the block the queries see."""

    number: int
    seen: Seen
    tensors: Sequence[Tensor]

    @property
    def alike(self) -> tuple[Any, ...]:
        """A key that is equal for rows whose attention runs the same operators: seen keys, and shapes."""
        return self.seen, tuple(x.shape for x in self.tensors)


def in_turn(copies: CopyStream, rows: Sequence[Row]) -> Iterator[tuple[int, Seen, list[Tensor]]]:
    """Yields (number, seen, tensors on the device) of each row, while the next row's tensors are copied."""
    last = len(rows) - 1

    def key(step: int) -> tuple[Any, ...]:
        return step == 0, step == last, rows[step].alike, rows[min(step + 1, last)].alike

    coming = [copies.to_device(x) for x in rows[0].tensors] if rows else []
    for step in keyed_steps(len(rows), key):
        copies.wait()
        here, coming = coming, [copies.to_device(x) for x in rows[step + 1].tensors] if step < last else []
        yield rows[step].number, rows[step].seen, here
        del here


class _InChunks(torch.autograd.Function):
    """Attention in chunks: the tensors of a HeadSource -> o [B, Z, L/N, A], stored as [B, L/N, Z, A]."""

    @staticmethod
    def forward(ctx: Any, fpdt: FPDT, source: HeadSource, sinks: Tensor | None, *tensors: Tensor) -> Tensor:
        repeats = fpdt.sent(source.heads, source.groups) // source.groups
        attending, waiting = fpdt.copies(tensors[0].device)
        keys: list[Sequence[Tensor]] = []
        of_chunks: list[Tensor] = []
        output = []
        chunks = fpdt.local_chunks(tensors[0].shape[source.position_dim])
        blocks_seen = fpdt.blocks_seen(chunks, source.attended)
        for i, positions in enumerate(chunks):
            here, part = source.at(tensors, positions), HeadPart(positions=positions)
            q = fpdt.to_heads(source.queries(here, part))
            k, v = fpdt.keys_to_heads(*source.keys_values(here, part), repeats)
            q_on_host, *own = (attending.to_host(x) for x in (q, k, v))
            keys.append(own)
            earlier = [Row(j, blocks_seen[i, j], keys[j]) for j in range(i) if (i, j) in blocks_seen]
            own_block: Block = ALL, k, v, blocks_seen[i, i]

            def blocks(
                earlier: Sequence[Row] = earlier, own: Block = own_block, plain: bool = source.attended.plain
            ) -> Iterator[Block]:
                if not plain:  # some queries see no key of an earlier chunk, but every query sees its own key
                    yield own
                for _, seen, (earlier_k, earlier_v) in in_turn(attending, earlier):
                    yield ALL, earlier_k, earlier_v, seen
                    attending.wait_on_host()
                    del earlier_k, earlier_v
                if plain:
                    yield own

            o, lse = attend_blocks(q, blocks(), sinks)
            attending.wait_on_host()
            del q, k, v, blocks, own_block
            waiting.wait()
            of_chunks += (q_on_host, *(waiting.to_host(x) for x in (o, lse, *here[: source.needed])))
            output.append(fpdt.to_positions(o, source.heads).transpose(1, 2))
            del o, lse, here
        waiting.wait()
        weights = tensors[source.with_positions :]
        ctx.save_for_backward(sinks, *weights, *(x for both in keys for x in both), *of_chunks)
        ctx.fpdt, ctx.source, ctx.weights = fpdt, source, len(weights)
        ctx.shapes = [x.shape for x in tensors[: source.with_positions]]
        return torch.cat(output, 1).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        fpdt, source = ctx.fpdt, ctx.source
        sinks, *saved = ctx.saved_tensors
        weights, saved = saved[: ctx.weights], saved[ctx.weights :]
        chunks, sent = fpdt.local_chunks(d_o.shape[POSITIONS]), fpdt.sent(source.heads, source.groups)
        blocks_seen = fpdt.blocks_seen(chunks, source.attended)
        keys = [saved[2 * i : 2 * i + 2] for i in range(len(chunks))]
        # the tensors of each chunk: q, o, lse, and those that the gradients of projections need
        rest, each = saved[2 * len(chunks) :], 3 + source.needed
        rows = [rest[start : start + each] for start in range(0, len(rest), each)]
        precise, scale = state_dtype(d_o.dtype), source.head_size**-0.5
        attending, waiting = fpdt.copies(d_o.device)
        gradients = [d_o.new_zeros(shape) for shape in ctx.shapes]
        gradients += (torch.zeros_like(x, dtype=precise) for x in weights)
        d_sinks = None if sinks is None else torch.zeros_like(sinks)
        # on the host between two chunks of keys: gradients of each chunk's output, and sums for its queries
        d_outputs = [attending.room(o.shape, d_o.dtype) for _, o, *_ in rows]
        d_queries = [attending.room(q.shape, precise) for q, *_ in rows]
        coming = [attending.to_device(x) for x in keys[0]]
        for j, positions in enumerate(chunks):
            needed = [waiting.to_device(x) for x in rows[j][3:]]
            k, v = coming
            of_queries = []
            for i in range(j, len(chunks)):
                if (seen := blocks_seen.get((i, j))) is not None:
                    begun = any((i, before) in blocks_seen for before in range(j))
                    sums = [d_outputs[i], d_queries[i]] if begun else []
                    of_queries.append(Row(i, seen, [*rows[i][:3], *sums]))
            for i, seen, (q, o, lse, *sums) in in_turn(attending, of_queries):
                d_of_chunk = sums[0] if sums else fpdt.to_heads(d_o[:, :, chunks[i]])
                block = d_of_chunk, q, k, v, o, lse, scale, seen
                d_q, d_keys, d_values = attention_to_block_backward(*block)
                if d_sinks is not None and i == j:
                    d_sinks.add_(sinks_gradient(d_of_chunk, o, lse, sinks))
                attending.wait_on_host()
                d_q = sums[1].add_(d_q) if sums else d_q.to(precise)
                if i == j:
                    own, d_k, d_v = d_q, d_keys.to(precise), d_values.to(precise)
                else:
                    d_k.add_(d_keys)
                    d_v.add_(d_values)
                    if sums:
                        attending.changed(d_q, d_queries[i])
                    else:
                        attending.to_host(d_of_chunk, d_outputs[i])
                        attending.to_host(d_q, d_queries[i])
                del q, o, lse, sums, d_of_chunk, block
                del d_q, d_keys, d_values
            del k, v
            if j + 1 < len(chunks):
                coming = [attending.to_device(x) for x in keys[j + 1]]
            own, d_k, d_v = (x.to(d_o.dtype) for x in (own, d_k, d_v))
            d_k, d_v = fpdt.key_gradients(d_k, d_v, sent, sent // source.groups)
            waiting.wait()
            here, sums = [*needed, *weights], source.at(gradients, positions)
            part = HeadPart(positions=positions)
            source.add_queries(here, sums, part, fpdt.to_positions(own, source.heads))
            source.add_keys_values(here, sums, part, d_k, d_v)
            del own, d_k, d_v, needed, here, sums
        attending.wait()
        d_weights = (d.to(x.dtype) for d, x in zip(gradients[len(ctx.shapes) :], weights, strict=True))
        return None, None, d_sinks, *gradients[: len(ctx.shapes)], *d_weights


class FPDT(Ulysses):
    """Ulysses by chunks of the sequence, with keys and values of other chunks on the host."""

    name = "fpdt"
    summary = "Ulysses by chunks of the sequence, which wait on the host (FPDT, Ulysses-Offload)"
    source = "arXiv 2408.16978, section 4"
    can_enclose = False
    meets = frozenset({"causal_attention"})
    heeds = HEEDS_ALL
    options_type = FPDTOptions
    options: FPDTOptions
    _copies: tuple[CopyStream, CopyStream] | None = None

    @property
    def length_multiple(self) -> int:
        return math.lcm(super().length_multiple, 1 if self.options.chunk else 2 * self.size)

    def chunk_length(self, length: int) -> int:
        """Positions of all ranks in a chunk of a sequence of ``length`` positions."""
        return self.options.chunk or max(1, length // 2)

    def local_chunks(self, length: int) -> list[slice]:
        """The positions of each chunk among the ``length`` that a rank has."""
        chunk = self.chunk_length(length * self.size) // self.size
        return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]

    def blocks_seen(self, chunks: Sequence[slice], attended: Attended) -> dict[tuple[int, int], Seen]:
        """By (number of a chunk of queries, number of a chunk of keys): which keys the queries see, over all
        ranks; pairs without any are left out. ``chunks`` are the slices of :meth:`local_chunks`."""
        pairs = ((i, j) for i in range(len(chunks)) for j in range(i + 1))
        if attended.plain:
            return {(i, j): i == j for i, j in pairs}
        of_all = [(x.start * self.size, x.stop * self.size) for x in chunks]
        seen = ((pair, attended.ranges(*([of_all[n]] for n in pair))) for pair in pairs)
        return {pair: ranges for pair, ranges in seen if ranges}

    def own(self, x: Tensor, dim: int) -> Tensor:
        chunks = x.split(self.chunk_length(x.shape[dim]), dim)
        return torch.cat([chunk_of(chunk, dim, self.rank, self.size) for chunk in chunks], dim)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        super().check_sizes(sites)
        chunk = self.options.chunk
        for site in sites:
            if chunk and site.dims.get("L", 0) > chunk and chunk % self.size:
                below = chunk - chunk % self.size
                can = " or ".join(str(n) for n in (below, below + self.size) if n)
                raise Unsupported(
                    f"chunks of {chunk} positions cannot be split over {self.size} ranks", f"use chunk {can}"
                )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind not in self.meets:
                continue
            d = site.dims
            chunk = min(d["L"], self.chunk_length(d["L"]))
            whole, rest = divmod(d["L"], chunk)
            for length, count in ((chunk, whole), (rest, 1)):
                pair = d["B"] * (length // self.size) * key_value_size(d) * element_bytes
                both = [
                    ("q and the output", self.padded(d["Z"])),
                    ("k and v", self.padded(self.sent(d["Z"], d.get("G", d["Z"])))),
                ]
                for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                    for purpose, heads in both if length else ():
                        yield Traffic(phase, purpose, "all_to_all", 2 * count * site.count, pair * heads // 2)

    def copies(self, device: torch.device) -> tuple[CopyStream, CopyStream]:
        """Two streams that copy tensors to the host and back: one for tensors that attention reads, one for
        the others."""
        if self._copies is None:
            kind = CopyStream if self.options.offload else NoCopies
            self._copies = kind(device), kind(device)
        return self._copies

    def to_heads(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else super().to_heads(x)

    def to_positions(self, x: Tensor, heads: int) -> Tensor:
        return x if self.size == 1 else super().to_positions(x, heads)

    def projected_attention(self, x: Tensor, heads: HeadSource) -> Tensor:
        if not heads.in_parts:
            return super().projected_attention(x, heads)
        return self.in_chunks(heads, *heads.tensors(x))

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        return self.in_chunks(GivenHeads(q, k, v, attended, sinks), q, k, v)

    def in_chunks(self, source: HeadSource, *tensors: Tensor) -> Tensor:
        """Attention [B, Z, L/N, A] of the heads that ``source`` projects from the tensors."""
        sinks = None if source.sinks is None else self.of_own_heads(source.sinks)
        o: Tensor = _InChunks.apply(self, source, sinks, *tensors)
        return o
