"""Untied Ulysses, or UPipe (arXiv 2602.21196): the heads go through Ulysses' all-to-alls in rounds.

UPipe is :mod:`spbench.impls.strategies.ulysses` for U heads at a time. A round projects the queries of its
heads, sends them, attends, and sends the output back. So the buffers for queries, keys, values and outputs
hold one round: U/Z of the buffers of Ulysses. U is at least N, one head a rank.

With grouped queries, a round takes one query (or more) of each of N groups. Rounds of the same groups follow
one another and use the same keys and values, which are projected and sent once, and whose gradients are
summed before they are sent back.

Backward keeps hidden states and outputs of this rank's positions, and the logarithms of the softmax's
denominators. So a round backward projects and sends queries, keys and values again, and sends the outputs
too. Forward sends the bytes of Ulysses, in more messages; backward sends twice as many.

Where a rank has only a part of the projections (tensor parallelism around UPipe), or only attention is
recomputed, all queries, keys and values are projected at once, and then sent and attended to in rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.kernels.kept_results import kept
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.layout import HEEDS_ALL, key_value_size, nearest, nearest_divisors, runs_again
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.head_sources import GivenHeads, HeadPart, HeadSource
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.sequence_chunks import GridOptions
from spbench.impls.strategies.ulysses import Ulysses
from spbench.impls.traffic import Traffic


@dataclass(frozen=True)
class UPipeOptions(GridOptions):
    """Options of :class:`UPipe`.

    Attributes:
        heads_a_round: heads of queries on each rank in a round; more heads give fewer and larger messages.
        fused_exchange: as of Ulysses.
    """

    heads_a_round: int = 1
    fused_exchange: bool = False

    def variants(self) -> Iterator[Mapping[str, Any]]:
        yield from super().variants()
        yield {"heads_a_round": 2}


@dataclass(frozen=True)
class Rounds:
    """The rounds of ``heads`` heads of queries and ``groups`` heads of keys and values over ``size`` ranks.
    Each of ``sets`` sets of keys and values has ``each`` rounds.

    Attributes:
        keys: a rank's heads of keys and values in a round.
        queries: heads of queries in a round for each head of ``keys``.
        runs: number of consecutive ranks that get a copy of the same head of keys and values.
    """

    size: int
    groups: int
    sets: int
    each: int
    keys: int
    queries: int
    runs: int

    @property
    def heads(self) -> int:
        """A rank's heads of queries in a round."""
        return self.keys * self.queries

    @property
    def count(self) -> int:
        """Number of rounds."""
        return self.sets * self.each

    def part(self, number: int, member: int = 0) -> HeadPart:
        """The heads of round ``member`` of the set ``number``."""
        groups = self.keys * self.size // self.runs
        return HeadPart(
            slice(number * groups, (number + 1) * groups),
            slice(member * self.queries, (member + 1) * self.queries),
            self.runs,
        )

    def of_rank(self, numbers: Tensor, rank: int) -> Tensor:
        """The numbers of a rank's heads of queries by round [count, heads], from those of all heads [Z]."""
        by_set = numbers.view(self.sets, -1, self.runs, self.each, self.queries)
        return by_set.movedim(3, 1).flatten(2).flatten(0, 1).chunk(self.size, 1)[rank]


def rounds_of(heads: int, groups: int, size: int, a_round: int) -> Rounds | None:
    """The rounds with ``a_round`` heads of queries a rank; None where a group would end within a round."""
    repeated = math.lcm(groups, size)
    of_group, of_rank = heads // repeated, repeated // size
    keys, queries = max(1, a_round // of_group), min(a_round, of_group)
    if keys * queries != a_round or of_group % queries or of_rank % keys:
        return None
    return Rounds(size, groups, of_rank // keys, of_group // queries, keys, queries, repeated // groups)


class _InRounds(torch.autograd.Function):
    """Attention in rounds: the tensors of a HeadSource -> o [B, Z, L/N, A], stored as [B, L/N, Z, A]."""

    @staticmethod
    def forward(ctx: Any, upipe: UPipe, source: HeadSource, sinks: Tensor | None, *tensors: Tensor) -> Tensor:
        sizes = tensors[0].shape[0], tensors[0].shape[source.position_dim]
        rounds = upipe.rounds(source.heads, source.groups)
        attention = upipe.repeated_attention(rounds, source.attended)

        def in_rounds() -> tuple[Tensor, ...]:
            o = tensors[0].new_empty(*sizes, source.heads, source.value_size).transpose(1, 2)
            others: list[Tensor] = []
            for number in keyed_steps(rounds.sets, lambda number: number == 0):
                k, v = upipe.keys_to_heads(*source.keys_values(tensors, rounds.part(number)), rounds.runs)
                for member in keyed_steps(rounds.each, lambda member: member == 0):
                    part = rounds.part(number, member)
                    q = upipe.to_heads(source.queries(tensors, part))
                    place = number * rounds.each + member
                    own = [] if sinks is None else [sinks[place]]
                    attended, saved = attention.forward(q, k, v, *own)
                    del q, own
                    if not others:
                        others = [x.new_empty(rounds.count, *x.shape) for x in saved]
                    for whole, x in zip(others, saved, strict=True):
                        whole[place].copy_(x)
                    del saved
                    into = part.of_queries(o, source.groups, 1)
                    into.copy_(upipe.to_positions(attended, rounds.heads * upipe.size).view(into.shape))
                    del attended, into
                del k, v
            return o, *others

        o, *others = kept(in_rounds)
        ctx.save_for_backward(sinks, *tensors, o, *others)
        ctx.upipe, ctx.source, ctx.attention, ctx.count = upipe, source, attention, len(tensors)
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        upipe, source, attention = ctx.upipe, ctx.source, ctx.attention
        sinks, *saved = ctx.saved_tensors
        tensors, (o, *others) = saved[: ctx.count], saved[ctx.count :]
        rounds = upipe.rounds(source.heads, source.groups)
        gradients = [torch.zeros_like(x) for x in tensors]
        d_sinks = None if sinks is None else torch.empty_like(sinks)
        for number in keyed_steps(rounds.sets, lambda number: number == 0):
            k, v = upipe.keys_to_heads(*source.keys_values(tensors, rounds.part(number)), rounds.runs)
            d_keys: Sequence[Tensor] = ()
            for member in keyed_steps(rounds.each, lambda member: member == 0):
                part = rounds.part(number, member)
                q = upipe.to_heads(source.queries(tensors, part))
                of_round, d_of_round = (
                    upipe.to_heads(part.of_queries(x, source.groups, 1).flatten(1, 3)) for x in (o, d_o)
                )
                place = number * rounds.each + member
                mine, own = [x[place] for x in others], [] if sinks is None else [sinks[place]]
                d_q, *d_kv = attention.backward(d_of_round, q, k, v, of_round, mine, *own)
                del q, of_round, d_of_round, mine, own
                if d_sinks is not None:
                    d_sinks[place].copy_(d_kv.pop())
                if member == 0:
                    d_keys = d_kv
                else:
                    for total, x in zip(d_keys, d_kv, strict=True):
                        total.add_(x)
                del d_kv
                d_q = upipe.to_positions(d_q, rounds.heads * upipe.size)
                source.add_queries(tensors, gradients, part, d_q)
                del d_q
            del k, v
            d_k, d_v = upipe.key_gradients(*d_keys, rounds.keys * upipe.size, rounds.runs)
            del d_keys
            source.add_keys_values(tensors, gradients, rounds.part(number), d_k, d_v)
            del d_k, d_v
        return None, None, d_sinks, *gradients


class UPipe(Ulysses):
    """The all-to-alls and the attention of Ulysses in rounds of some heads each."""

    name = "upipe"
    summary = "Ulysses in rounds of some heads, which project, send and attend (UPipe, Untied Ulysses)"
    source = "arXiv 2602.21196; around ring_attention its ring"
    meets = frozenset({"causal_attention"})
    heeds = HEEDS_ALL
    options_type = UPipeOptions  # type: ignore[assignment]  # it pads no heads
    options: UPipeOptions  # type: ignore[assignment]

    def rounds(self, heads: int, groups: int) -> Rounds:
        """The rounds for ``heads`` heads of queries and ``groups`` of keys and values, over all ranks."""
        rounds = rounds_of(heads, groups, self.size, self.options.heads_a_round)
        assert rounds is not None, "checked before"
        return rounds

    def check_sizes(self, sites: Sequence[Site]) -> None:
        for site in sites:
            heads, groups = site.dims.get("Z", self.size), site.dims.get("G", site.dims.get("Z", self.size))
            if heads % self.size:
                raise Unsupported(
                    f"{heads} attention heads cannot be split over {self.size} ranks",
                    f"use {nearest_divisors(heads, self.size)}, or ulysses with its option pad_heads",
                )
            asked = self.options.heads_a_round
            if site.kind in self.meets and rounds_of(heads, groups, self.size, asked) is None:
                can = [n for n in range(1, heads + 1) if rounds_of(heads, groups, self.size, n)]
                raise Unsupported(
                    f"{asked} heads a round of {heads} in {groups} groups on {self.size} ranks end in one",
                    f"use heads_a_round {nearest(can, asked)}",
                )

    def inside(self, site: Site) -> Site:
        if site.kind not in self.meets:
            return super().inside(site)
        d = site.dims
        rounds = self.rounds(d["Z"], d.get("G", d["Z"]))
        own = {"Z": rounds.heads, "G": rounds.keys}
        return replace(site, count=site.count * rounds.count, dims={**d, **own})

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind not in self.meets:
                continue
            d = site.dims
            rounds = self.rounds(d["Z"], d.get("G", d["Z"]))
            feature = self.size * d["B"] * (d["L"] // self.size) * element_bytes
            # bytes of one head of a pair: q and the output, or k and v
            pair = feature * key_value_size(d)
            of_queries = site.count * rounds.count, pair * rounds.heads
            of_keys = site.count * rounds.sets, pair * rounds.keys
            for phase in ["forward", *(["backward"] if runs_again(site) else [])]:
                for purpose, (count, payload) in (("q and the output", of_queries), ("k and v", of_keys)):
                    yield Traffic(phase, purpose, "all_to_all", 2 * count, payload // 2)
            for purpose, (count, payload) in (
                ("q, the output and their gradients", of_queries),
                ("k, v and their gradients", of_keys),
            ):
                yield Traffic("backward", purpose, "all_to_all", 4 * count, payload // 2)

    def repeated_attention(self, rounds: Rounds, attended: Attended) -> RepeatedAttention:
        """Attention of the heads of any round to whole sequences, by the strategy within."""
        # super() of Ulysses, because its own attention would send the heads again
        within = super(Ulysses, self).causal_attention

        def attend(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            return within(q, k, v) if attended.plain and not sinks else within(q, k, v, attended, *sinks)

        return RepeatedAttention(attend)

    def in_rounds(self, source: HeadSource, *tensors: Tensor) -> Tensor:
        """Attention [B, Z, L/N, A] of the heads that ``source`` projects from the tensors."""
        sinks = source.sinks
        if sinks is not None:
            sinks = self.rounds(source.heads, source.groups).of_rank(sinks, self.rank)
        o: Tensor = _InRounds.apply(self, source, sinks, *tensors)
        return o

    def projected_attention(self, x: Tensor, heads: HeadSource) -> Tensor:
        if self.size == 1 or not heads.in_parts:
            return super().projected_attention(x, heads)
        return self.in_rounds(heads, *heads.tensors(x))

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if self.size == 1:
            return super(Ulysses, self).causal_attention(q, k, v, attended, sinks)
        return self.in_rounds(GivenHeads(q, k, v, attended, sinks), q, k, v)
