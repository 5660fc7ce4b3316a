"""Context parallelism by document: each document is computed on as few ranks as its length needs (dynamic
context parallelism of Megatron-LM, ``--dynamic-context-parallel``, earlier ``--hybrid-context-parallel``).

Every rank holds all weights. The documents of a packed sequence are divided among groups of ranks by the
rules of :mod:`spbench.impls.strategies.document_groups`. A rank has its share of its group's documents only,
so ranks may have unlike numbers of positions. Within a group each document lies as Transformer Engine places
it ("zigzag_by_document"), and the group's keys and values are all-gathered; a group of one rank sends
nothing. A group's documents are padded to a multiple of its ranks within attention only, whereas Megatron-LM
pads each document to twice its ranks everywhere.

All positions of a rank go through the layers at once, also if their documents take several rounds, which
Megatron-LM runs as micro-batches one after another. So with several rounds the rounds follow each other
within each layer, and memory is that of all rounds. The loss is a sum over tokens with the weights of
one device, so the groups change no gradient (Megatron-LM needs ``--calculate-per-token-loss`` for that).

Megatron-LM's pull request 5679 refuses dynamic groups with experts, MLA, Megatron-FSDP, recurrent layers and
CUDA graphs. Here recurrent layers are refused, and with packed documents also experts, pipeline stages and a
further cut of positions.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended, Interval, Numbers, Ranges
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.options import Options
from spbench.impls.strategies.all_gather_kv import GatheredKeys, gather_traffic
from spbench.impls.strategies.base import Site, Unsupported
from spbench.impls.strategies.blockwise import attention_to_blocks
from spbench.impls.strategies.document_groups import (
    RULES,
    DocumentGroup,
    GroupRule,
    Round,
    fewest_rounds,
    scheduled,
)
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placements import intervals
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic

#: the placement of a group's documents on its ranks
_PLACEMENT = "zigzag_by_document"


@dataclass(frozen=True)
class DynamicCPOptions(Options):
    """Options of :class:`DynamicCP`.

    Attributes:
        groups: the rule by which documents get ranks, one of RULES of
            :mod:`spbench.impls.strategies.document_groups`.
        most_tokens: the most tokens of a rank in a round (``--max-seqlen-per-dp-cp-rank``); None: the fewest
            by which all documents take one round.
        least_ranks: the fewest ranks of a group (``--min-dynamic-context-parallel-size``); of "static", the
            ranks of each group (``--context-parallel-size``).
    """

    groups: str = "power_of_two"
    most_tokens: int | None = None
    least_ranks: int = 1

    words = {"groups": RULES}

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """See :meth:`Options.searched`. Without packed documents all ranks are one group, as in
        all_gather_kv, so that nothing is tried."""
        if "documents" in heeded:
            yield {}
            yield from ({"groups": "static", "least_ranks": n} for n in (2, 4, 8))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("most_tokens", "least_ranks"):
            if (n := getattr(self, name)) is not None and n < 1:
                raise ValueError(f"{name} is 1 or more, not {n}")


@dataclass(frozen=True)
class _Share:
    """What one rank holds in a round.

    Attributes:
        division: the ranks of each group of the round.
        ranks: the ranks of this rank's group.
        rank: the number of this rank in its group.
        documents: the lengths of the group's documents; if there are too few tokens for equal shares, also
            that of a filler behind them, which no rank holds.
        begins: the place in the sequence of each of the group's documents.
    """

    division: tuple[range, ...]
    ranks: range
    rank: int
    documents: tuple[int, ...]
    begins: tuple[int, ...]

    @classmethod
    def of(cls, groups: Round, rank: int, lengths: Sequence[int]) -> Self:
        """The share of a rank among the documents of these lengths."""
        division = tuple(group.ranks for group in groups)
        ranks, numbers = next(group for group in groups if rank in group.ranks)
        documents, before = [lengths[number] for number in numbers], [0, *accumulate(lengths)]
        filler = -sum(documents) % len(ranks)
        whole, begins = (*documents, *[filler] * bool(filler)), tuple(before[number] for number in numbers)
        return cls(division, ranks, rank - ranks.start, whole, begins)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rows(self) -> int:
        """The number of this rank's positions, with filler; equal on all ranks of the group."""
        return sum(self.documents) // self.size

    @property
    def positions(self) -> Numbers:
        """The positions of the sequence that this rank holds, as runs [n, 2] in their order."""
        if not self.documents:
            return np.zeros((0, 2), np.int64)
        packed = Attended(self.documents)
        runs = intervals(_PLACEMENT, self.size, self.rows, packed)[self.rank]
        document, begin, start, end = packed.within_documents(runs).T
        real = document < len(self.begins)
        moved = np.array(self.begins)[document[real]] - begin[real]
        return np.stack((start[real] + moved, end[real] + moved), 1)

    def attended(self, window: int | None) -> Attended:
        """The positions to which positions of the group's documents attend."""
        return Attended(self.documents, window)


@dataclass(frozen=True)
class _RealMeetings(Meetings):
    """Meetings of a rank's first ``real`` queries; the filler behind these sees no key."""

    real: int = 0

    def of_all(self) -> tuple[Interval, Ranges]:
        owners, ranges = super().of_all()
        return owners, Ranges(ranges.numbers[ranges.numbers[:, 0] < self.real])


class DynamicCP(SequenceChunks):
    """Shares of documents, each document on a group of ranks that is as small as its length allows."""

    name = "dynamic_cp"
    summary = (
        "each document on as few ranks as its length needs; the group's keys and values are all-gathered"
    )
    source = "NVIDIA/Megatron-LM, pull requests 2282 and 5679; any size: arXiv 2602.21788"
    meets = frozenset({"causal_attention"})
    heeds = HEEDS_ALL
    options_type = DynamicCPOptions
    options: DynamicCPOptions

    def _rounds(self, lengths: tuple[int, ...]) -> Sequence[Round]:
        """The groups of ranks in each round, for documents of these lengths."""
        o = self.options
        rule = GroupRule(o.groups, self.size, o.most_tokens or 1, o.least_ranks)
        return fewest_rounds(rule, lengths) if o.most_tokens is None else scheduled(rule, lengths)

    def _shares(self, attended: Attended, length: int) -> list[_Share]:
        """This rank's share of a sequence of ``length`` positions, by round; a sequence of one document is on
        all ranks."""
        lengths = attended.documents or (length,)
        all_ranks = [(DocumentGroup(range(self.size), (0,)),)]
        rounds = self._rounds(lengths) if attended.documents else all_ranks
        return [_Share.of(groups, self.rank, lengths) for groups in rounds]

    def _take_packed(self, attended: Attended) -> None:
        super()._take_packed(attended)
        if self.place.mesh is not None and self.size > 1 and attended.documents:
            for share in self._shares(attended, 0):
                self.place.divided(*self.axes, parts=share.division)

    def _held(self, length: int) -> list[_Share]:
        """This rank's shares of a sequence of ``length`` positions."""
        return self._shares(self.packed, length)

    def own(self, x: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return x
        parts = []
        for share in self._held(x.shape[dim]):
            # alternately the gap before a run, and the run: one operator cuts thousands of runs
            cuts = np.diff(share.positions.ravel(), prepend=0, append=x.shape[dim])
            parts += x.split(cuts.tolist(), dim)[1::2]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def _rows(self, length: int) -> list[int]:
        """The numbers of positions that this rank holds, by round."""
        return [int(np.diff(share.positions).sum()) for share in self._held(length)]

    def outside(self, site: Site) -> Site:
        if self.size == 1 or "L" not in site.dims:
            return super().outside(site)
        return replace(site, dims={**site.dims, "L": sum(self._rows(site.dims["L"]))})

    @classmethod
    def roles(cls, axis: str, size: int) -> list[list[int]]:
        # ranks of few enough that each kind of load gets a rank of its own that is traced
        return [[*range(first, min(first + 8, size))] for first in range(0, size, 8)]

    def _check_own(self, sites: Sequence[Site]) -> None:
        super()._check_own(sites)
        o, around = self.options, self.outermost
        if self.size == 1:
            return
        if o.least_ranks > self.size or (o.groups == "static" and self.size % o.least_ranks):
            raise Unsupported(
                f"{self.size} ranks have no groups of {o.least_ranks}",
                "set strategy_options.least_ranks to a divisor of the ranks",
            )
        if not any("documents" in site.dims for site in sites):
            return  # all ranks have equal shares
        why = "ranks have unlike numbers of positions"
        if any(site.kind == "experts" for site in sites):
            raise Unsupported(f"{self.name} has no experts, because {why}", "use ring_attention")
        if self.place.size("pp") > 1:
            raise Unsupported(f"{self.name} has no pipeline stages, because {why}", "use pp 1")
        if around.sequence_parts != self.size:
            raise Unsupported(
                f"{around.name} cannot cut positions again, because {why}", "use tensor_parallel"
            )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind in self.meets and self.size > 1:
                for share in self._held(site.dims["L"]):
                    if share.size > 1 and share.documents:
                        whole = replace(site, dims={**site.dims, "L": share.rows * share.size})
                        yield from gather_traffic(whole, element_bytes, share.size)

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        if self.size == 1:
            return super().causal_attention(q, k, v, attended, sinks)
        length = q.shape[2] * self.size  # read only without packed documents, where shares are equal
        rows = self._rows(length)
        of_round = zip(*(x.split(rows, 2) for x in (q, k, v)), strict=True)
        parts = [
            self._attend(share, qkv, attended.window, sinks)
            for share, qkv in zip(self._held(length), of_round, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _attend(
        self, share: _Share, qkv: tuple[Tensor, ...], window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention within a round's group: this rank's q [B, Z, M, A], k and v [B, G, M, A] -> [B, Z, M,
        A]."""
        q, k, v = qkv
        if not share.documents:
            return q[..., : v.shape[-1]]
        seen = share.attended(window)
        if share.size == 1:
            return super().causal_attention(q, k, v, seen, sinks)
        group = self.place.divided(*self.axes, parts=share.division)
        assert group is not None
        whole, real = share.attended(None), q.shape[2]
        meetings = _RealMeetings(_PLACEMENT, share.rank, share.size, share.rows, seen, whole, real=real)
        filler = share.rows - real
        if filler:
            q, k, v = (F.pad(x, (0, 0, 0, filler)) for x in (q, k, v))
        o = attention_to_blocks(q, k, v, GatheredKeys(group, meetings, "reduce_scatter"), sinks)
        return o[:, :, :real] if filler else o

    def attended_pairs(self, attended: Attended, length: int) -> int:
        if self.size == 1:
            return super().attended_pairs(attended, length)
        shares = self._shares(attended, length)
        return sum(int(attended.pairs(share.positions).sum()) for share in shares)

    def document_parts(self, attended: Attended, length: int) -> Sequence[int]:
        if self.size == 1:
            return super().document_parts(attended, length)
        shares = self._shares(attended, length)
        return [-(-n // share.size) for share in shares for n in share.documents]
