"""Collectives of rows where ranks have different numbers of rows, as tokens on their way to experts.

====================  =======================  ==========================  =================================
function              forward                  backward                    use: x before, result after
====================  =======================  ==========================  =================================
all_to_all_rows       all-to-all               all-to-all                  rows for each rank
move_rows             all-to-all               all-to-all                  rows for each rank
all_gather_rows       all-gather               reduce-scatter              rows, for another use on each rank
reduce_scatter_rows   reduce-scatter           all-gather                  parts of a sum, rows
====================  =======================  ==========================  =================================

Every rank knows all numbers of rows. Without a group, or with one rank, the functions do nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import (
    Group,
    all_gather,
    joined,
    reduce_scatter,
    start_all_gather,
    with_gradient,
)
from spbench.impls.kernels.kept_results import kept_exchange


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """All-to-all of rows: sends the rows of x [sum of ``sent``, ...], the next ``sent[i]`` of which are for
    rank i; returns the received rows [sum of ``received``, ...]."""
    return with_gradient(_rows_sent, _rows_sent_back, x, tuple(sent), tuple(received), True, group)


def move_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """:func:`all_to_all_rows` of rows that are not tokens for experts: no block keeps its result."""
    return with_gradient(_rows_sent, _rows_sent_back, x, tuple(sent), tuple(received), False, group)


def all_gather_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """:func:`all_gather` along the first dim, where rank i has ``rows[i]`` rows; each rank sends as many rows
    as the rank with the most."""
    if group is None or group.size() == 1:
        return x
    whole = all_gather(_padded(x, max(rows)), 0, group)
    return whole if len(set(rows)) == 1 else torch.cat(_own_rows(whole, rows))


def reduce_scatter_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """:func:`reduce_scatter` along the first dim, where rank i gets ``rows[i]`` rows."""
    if group is None or group.size() == 1:
        return x
    if len(set(rows)) > 1:
        x = torch.cat([_padded(part, max(rows)) for part in x.split(list(rows))])
    return reduce_scatter(x, 0, group)[: rows[group.rank()]]


def gather_flags(x: Tensor, group: Group) -> Tensor:
    """x of all ranks one after another along the first dim, for a tensor without gradient."""
    if group is None or group.size() == 1:
        return x
    parts, arrival = start_all_gather(x, group)
    arrival.wait()
    return joined(parts, 0)


def _padded(x: Tensor, rows: int) -> Tensor:
    if len(x) == rows:
        return x
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def _own_rows(whole: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return [part[:n] for part, n in zip(whole.chunk(len(rows)), rows, strict=True)]


def _rows_sent(
    x: Tensor, sent: Sequence[int], received: Sequence[int], keeps: bool, group: dist.ProcessGroup
) -> Tensor:
    def run() -> Tensor:
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), [*received], [*sent], group=group)
        return y

    return kept_exchange(run) if keeps else run()


def _rows_sent_back(x: Tensor, sent: Sequence[int], received: Sequence[int], *others: Any) -> Tensor:
    return _rows_sent(x, received, sent, *others)
