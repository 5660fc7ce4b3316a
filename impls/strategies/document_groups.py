"""Groups of ranks for packed documents: which ranks compute which documents, and when.

The documents of a sequence are computed in rounds. In a round the ranks are divided into groups of
consecutive ranks, and each document of the round is spread evenly over the ranks of one group. The rules are
those of Megatron-LM's schedulers over its DP x CP ranks, each with its own choice of groups:

- "static": groups of equal size, as without a choice (DpBalancedScheduler in
  megatron/core/datasets/data_schedule.py). Documents fill bins in their order; a document that does not fit
  opens the next bin; bins go to the groups in turn.
- "power_of_two": the longest document opens a group of the fewest ranks that hold it, a power of two; each
  further document joins a group, or opens one of these or more ranks, where the busiest rank then has least
  work (next_hdp_group_packing_aware in data_schedule_utils.py, of 2026).
- "buckets": each document has the fewest ranks that hold it, a power of two. Documents lie by length in
  buckets of about equal work, one for each number of ranks. A round ends when the ranks' work is even within
  5% (next_hdp_group in megatron/core/pipeline_parallel/hybrid_cp_schedule.py, of 2025).
- "any_size": the rule of "power_of_two" with groups of any number of ranks (Megatron-LM's pull request 7097;
  FCP, arXiv 2602.21788).

The work of a rank is the sum of length**2 / ranks over its documents. No rank is without a document in a
round, because the smallest groups grow until all ranks are in one; where these cannot, all ranks form one
group. Static groups may stay empty.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from spbench.impls.layout import Unsupported

RULES = ("power_of_two", "any_size", "buckets", "static")

#: by how much the work in a round may exceed what documents of the longest one's length would make, and by
#: how much the ranks' work may differ at the end of a round of "buckets"; a bucket may exceed its share more
_SLACK, _BUCKET_SLACK = 0.05, 0.10
#: the ratio of two numbers of tokens that :func:`fewest_rounds` tries, one after another
_FINER = 2**0.125

#: a document: (its number in the sequence, its length)
Document = tuple[int, int]


class DocumentGroup(NamedTuple):
    """Consecutive ranks, and the numbers of the documents that they share, in the order of the sequence."""

    ranks: range
    documents: tuple[int, ...]


#: the groups of all ranks, in their order
Round = tuple[DocumentGroup, ...]


@dataclass(frozen=True)
class GroupRule:
    """How documents are given to groups of ranks.

    Attributes:
        name: one of RULES.
        ranks: the number of all ranks, N.
        most_tokens: the most tokens of a rank in a round.
        least_ranks: the fewest ranks of a group; of "static", the ranks of each group.
    """

    name: str
    ranks: int
    most_tokens: int
    least_ranks: int = 1

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks that a group may have, the smallest first."""
        if self.name == "static":
            return [self.least_ranks]
        of_any = range(1, self.ranks + 1)
        sizes = (
            of_any if self.name == "any_size" else [n for n in of_any if n & (n - 1) == 0 or n == self.ranks]
        )
        return [n for n in sizes if n >= self.least_ranks]

    def needed(self, length: int) -> int:
        """The fewest ranks that hold a document.

        Raises:
            Unsupported: no group holds it.
        """
        for size in self.sizes:
            if length <= size * self.most_tokens:
                return size
        raise Unsupported(
            f"a document of {length} tokens exceeds groups of {self.sizes[-1]} ranks of {self.most_tokens}"
            " tokens",
            f"set strategy_options.most_tokens to {-(-length // self.sizes[-1])} or more",
        )


@dataclass
class _Open:
    """A group while a round is being filled; tokens and work are those of one of its ranks."""

    size: int
    documents: list[Document] = field(default_factory=list)
    tokens: float = 0.0
    work: float = 0.0

    def add(self, document: Document) -> None:
        self.documents.append(document)
        self.tokens += document[1] / self.size
        self.work += document[1] ** 2 / self.size

    def takes(self, length: int, most: int) -> bool:
        return self.tokens + length / self.size <= most


def _opened(size: int, document: Document, groups: list[_Open]) -> None:
    groups.append(_Open(size))
    groups[-1].add(document)


@lru_cache(maxsize=64)
def scheduled(rule: GroupRule, lengths: tuple[int, ...]) -> tuple[Round, ...]:
    """The rounds in which all documents of these lengths are computed, each once.

    Raises:
        Unsupported: a document is too long for all groups.
    """
    documents = [*enumerate(lengths)]
    if rule.name == "static":
        return tuple(_static_rounds(rule, documents))
    fill = _by_buckets if rule.name == "buckets" else _by_least_work
    waiting = sorted(documents, key=lambda each: -each[1])
    rounds = []
    while waiting:
        groups = fill(rule, waiting)
        if not _grown(rule, groups):
            groups = [_of_all_ranks(rule, waiting)]
        rounds.append(_numbered(groups))
        done = {number for group in rounds[-1] for number in group.documents}
        waiting = [each for each in waiting if each[0] not in done]
    return tuple(rounds)


@lru_cache(maxsize=64)
def fewest_rounds(rule: GroupRule, lengths: tuple[int, ...]) -> tuple[Round, ...]:
    """The rounds with the fewest tokens a rank by which there are fewest rounds, at best one.
    ``rule.most_tokens`` is ignored."""
    total, found = sum(lengths), dict[int, tuple[Round, ...]]()
    most = max(-(-total // rule.ranks), -(-max(lengths) // rule.sizes[-1]))
    while True:
        rounds = scheduled(GroupRule(rule.name, rule.ranks, most, rule.least_ranks), lengths)
        found.setdefault(len(rounds), rounds)
        if len(rounds) == 1 or most >= total:
            return found[min(found)]
        most = min(total, math.ceil(most * _FINER))


def _numbered(groups: Sequence[_Open]) -> Round:
    """The groups on consecutive ranks, in their order."""
    numbered, first = [], 0
    for group in groups:
        documents = tuple(sorted(number for number, _ in group.documents))
        numbered.append(DocumentGroup(range(first, first + group.size), documents))
        first += group.size
    return tuple(numbered)


def _static_rounds(rule: GroupRule, documents: Sequence[Document]) -> Iterator[Round]:
    groups = rule.ranks // rule.least_ranks
    bins: list[_Open] = []
    for document in documents:
        rule.needed(document[1])
        if bins and bins[-1].takes(document[1], rule.most_tokens):
            bins[-1].add(document)
        else:
            _opened(rule.least_ranks, document, bins)
    while len(bins) % groups:  # each group has a bin in each round; the last bins give up documents for it
        several = [each for each in bins if len(each.documents) > 1]
        bins.append(_Open(rule.least_ranks, [several[-1].documents.pop()] if several else []))
    for first in range(0, len(bins), groups):
        yield _numbered(bins[first : first + groups])


def _by_least_work(rule: GroupRule, waiting: Sequence[Document]) -> list[_Open]:
    """The groups of a round of "power_of_two" and "any_size"; ``waiting`` has the longest document first."""
    tallest, most = waiting[0][1], rule.most_tokens
    groups: list[_Open] = []
    _opened(rule.needed(tallest), waiting[0], groups)
    cap = tallest * most * (1 + _SLACK)
    for document in waiting[1:]:
        length, least = document[1], rule.needed(document[1])
        free, busiest = rule.ranks - sum(group.size for group in groups), max(group.work for group in groups)
        ways: list[tuple[float, Callable[[], None]]] = []
        for size in (n for n in rule.sizes if n >= least):
            cost = length**2 / size
            ways += [
                (max(busiest, group.work + cost), partial(group.add, document))
                for group in groups
                if group.size == size and group.takes(length, most)
            ]
            if free >= size:
                ways.append((max(busiest, cost), partial(_opened, size, document, groups)))
        work, place = min(ways, key=lambda way: way[0], default=(math.inf, None))
        if place is not None and work <= cap:
            place()
    return groups


def _by_buckets(rule: GroupRule, waiting: Sequence[Document]) -> list[_Open]:
    """The groups of a round of "buckets"; ``waiting`` has the longest document first."""
    buckets, groups = _buckets(rule, waiting), list[_Open]()
    while any(buckets):
        free = rule.ranks - sum(group.size for group in groups)
        heads = (bucket for bucket in buckets if bucket)
        sizes = {group.size for group in groups}
        bucket = next((b for b in heads if (n := rule.needed(b[0][1])) in sizes or free >= n), None)
        if bucket is None:
            break
        length, size = bucket[0][1], rule.needed(bucket[0][1])
        able = [group for group in groups if group.size == size and group.takes(length, rule.most_tokens)]
        if free >= size:
            _opened(size, bucket.pop(0), groups)
        elif able:
            min(able, key=lambda group: group.work).add(bucket.pop(0))
        else:
            break
        works = [group.work for group in groups] + [0.0] * (rule.ranks > sum(g.size for g in groups))
        if size < groups[0].size and max(works) - min(works) <= _SLACK * max(works):
            break
    return groups


def _buckets(rule: GroupRule, waiting: Sequence[Document]) -> list[list[Document]]:
    """The documents in buckets of about equal work, at least one for each number of ranks needed."""
    count = len({rule.needed(length) for _, length in waiting})
    works = [length**2 / rule.needed(length) for _, length in waiting]
    share, so_far = sum(works) / count, 0.0
    buckets: list[list[Document]] = [[]]
    for place, (document, work) in enumerate(zip(waiting, works, strict=True)):
        too_much = so_far + work > share * (1 + _BUCKET_SLACK)
        if buckets[-1] and (too_much or len(waiting) - place <= count - len(buckets)):
            buckets.append([])
            so_far = 0.0
        buckets[-1].append(document)
        so_far += work
    return buckets


def _grown(rule: GroupRule, groups: list[_Open]) -> bool:
    """Let the first of the smallest groups grow to the next size until all ranks are in a group; False if
    there are too few ranks for that."""
    while free := rule.ranks - sum(group.size for group in groups):
        smallest = min(groups, key=lambda group: group.size)
        larger = next((n for n in rule.sizes if n > smallest.size), math.inf)
        if larger - smallest.size > free:
            return False
        smallest.size = int(larger)
    return True


def _of_all_ranks(rule: GroupRule, waiting: Sequence[Document]) -> _Open:
    """One group of all ranks, with the documents that fit, the longest first."""
    group = _Open(rule.ranks)
    for document in waiting:
        if group.takes(document[1], rule.most_tokens):
            group.add(document)
    return group
