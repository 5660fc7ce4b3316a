"""Tokens put in the order of their experts, and back.

Kernels that send rows between ranks also gather and sum rows on the way (:data:`WITHIN_TRANSFERS`).

"plain" uses torch's operators, as Megatron-LM without --moe-permute-fusion. "deterministic" does the same
with Megatron-LM's --deterministic-mode, which sums a token's rows by index_add, for which autograd keeps the
rows (unpermute of moe_utils.py, since October 2025). "fused" is one operator each way that keeps only a map
of rows, as TransformerEngine (pytorch/permutation.py): int32 [T, 2 E + 1] for tokens, int32 [R] for chunks.
The host knows the number of rows.

Letters: T tokens, E experts, R rows (a token has one for each of its experts), H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator

PERMUTATIONS = ("plain", "deterministic", "fused", "indexed")

#: operators that are part of a transfer and take no extra time, because DeepEP's kernels read each token's
#: row in place, once for each rank, and sum rows that come back as they arrive (deepseek-ai/DeepEP 567632d,
#: csrc/kernels/intranode.cu: dispatch, combine); and pieces of an all-to-all that other ranks read and write
#: in place, in symmetric memory (:func:`spbench.impls.strategies.ulysses.fused_all_to_all`)
WITHIN_TRANSFERS = ("sent_rows", "summed_rows", "exchanged_pieces")


@operator("spbench::sent_rows", fake=lambda x, token: x.new_empty(len(token), x.shape[1]))
def _sent(x: Tensor, token: Tensor) -> Tensor:
    return x[token]


@operator("spbench::summed_rows", fake=lambda rows, token, tokens: rows.new_empty(tokens, rows.shape[1]))
def _summed(rows: Tensor, token: Tensor, tokens: int) -> Tensor:
    return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, token, rows)


#: (tokens x [T, H], the number of each row's token [R]) -> the rows [R, H] to send, copies of the tokens
sent_rows = differentiable(_sent, _summed, lambda x, token, rows: (token, len(x)))
#: (rows [R, H], the number of each row's token [R], T) -> the sum [T, H] of each token's rows
summed_rows = differentiable(_summed, _sent, lambda rows, token, tokens, x: (token,))


@operator("spbench::exchanged_pieces", fake=lambda x: x.new_empty(x.shape))
def exchanged_pieces(x: Tensor) -> Tensor:
    """x without gaps: the pieces that other ranks read, or that they have written, in symmetric memory."""
    return x.clone(memory_format=torch.contiguous_format)


@operator("spbench::permute_rows")
def _permute_rows(x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = chosen.shape
    flat = chosen.mT.reshape(-1).nonzero()[:rows, 0]
    token, expert = flat % tokens, flat // tokens
    row_of = x.new_full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    row_of[token, expert] = torch.arange(rows, dtype=torch.int32, device=x.device)
    return x[token], weights[token, expert], row_of


@_permute_rows.register_fake
def _(x: Tensor, weights: Tensor, chosen: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = chosen.shape
    row_of = x.new_empty(tokens, 2 * experts + 1, dtype=torch.int32)
    return x.new_empty(rows, x.shape[1]), weights.new_empty(rows), row_of


def _places(row_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token, expert and row number, each [R], of all rows in a map of rows, in the order of tokens."""
    experts = (row_of.shape[1] - 1) // 2
    token, expert = (row_of[:, :experts] >= 0).nonzero(as_tuple=True)
    return token, expert, row_of[token, expert].long()


@operator("spbench::permute_rows_backward")
def _permute_rows_backward(d_rows: Tensor, d_weights: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    token, expert, row = _places(row_of)
    tokens, width = row_of.shape
    d_x = d_rows.new_zeros(tokens, d_rows.shape[1]).index_add_(0, token, d_rows[row])
    d_all = d_weights.new_zeros(tokens, (width - 1) // 2)
    d_all[token, expert] = d_weights[row]
    return d_x, d_all


@_permute_rows_backward.register_fake
def _(d_rows: Tensor, d_weights: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = row_of.shape
    return d_rows.new_empty(tokens, d_rows.shape[1]), d_weights.new_empty(tokens, (width - 1) // 2)


@operator("spbench::unpermute_rows", fake=lambda rows, row_of: rows.new_empty(row_of.shape[0], rows.shape[1]))
def _unpermute_rows(rows: Tensor, row_of: Tensor) -> Tensor:
    token, _, row = _places(row_of)
    return rows.new_zeros(row_of.shape[0], rows.shape[1]).index_add_(0, token, rows[row])


@operator(
    "spbench::unpermute_rows_backward", fake=lambda d_y, row_of, rows: d_y.new_empty(rows, d_y.shape[1])
)
def _unpermute_rows_backward(d_y: Tensor, row_of: Tensor, rows: int) -> Tensor:
    token, _, row = _places(row_of)
    d_rows = d_y.new_zeros(rows, d_y.shape[1])
    d_rows[row] = d_y[token]
    return d_rows


_PERMUTE = differentiable(
    _permute_rows,
    lambda d_y, d_w, _, row_of: _permute_rows_backward(d_y.contiguous(), d_w.contiguous(), row_of),
    lambda *arguments_and_results: arguments_and_results[-1:],
    results=3,
)


_UNPERMUTE = differentiable(
    _unpermute_rows,
    lambda d_y, *kept: _unpermute_rows_backward(d_y.contiguous(), *kept),
    lambda rows, row_of, y: (row_of, len(rows)),
)


def permute(x: Tensor, weights: Tensor, chosen: Tensor, rows: int, way: str) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of tokens x [T, H] by expert, and within an expert in the order of the tokens.

    Args:
        weights: the router's weights [T, E].
        chosen: whether a token goes to an expert, bool [T, E].
        rows: R, the number of true entries of ``chosen``.

    Returns the rows [R, H], their weights [R], and the places that :func:`unpermute` needs: the token of each
    row, or a map of rows.
    """
    if way == "fused":
        return _PERMUTE(x, weights, chosen, rows)
    # a stable sort puts true entries first, and leaves experts and tokens in their order
    order = chosen.mT.contiguous().reshape(-1).argsort(descending=True, stable=True)[:rows]
    token = order % len(x)
    indexed = way == "indexed"
    own = x.gather(0, token[:, None].expand(-1, x.shape[1])) if indexed else x.index_select(0, token)
    return own, weights.mT.contiguous().reshape(-1)[order], token


def unpermute(rows: Tensor, places: Tensor, tokens: int, way: str) -> Tensor:
    """The sum [T, H] of each token's rows [R, H]; ``places`` is the last result of :func:`permute`."""
    if way == "fused":
        return _UNPERMUTE(rows, places)
    if way == "deterministic":
        return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, places, rows)
    return rows.new_zeros(tokens, rows.shape[1]).scatter_add(0, places[:, None].expand_as(rows), rows)


def _row_order(sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """The earlier number of each row [R], after chunks of ``sizes`` rows are put in another order."""
    return reordered(torch.arange(sum(sizes)), sizes, order)


def _chunks(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> list[Tensor]:
    parts = x.split(list(sizes))
    return [parts[i] for i in order]


@operator(
    "spbench::sort_rows",
    fake=lambda x, weights, sizes, order: (
        x.new_empty(x.shape),
        torch.empty_like(weights),
        x.new_empty(len(x), dtype=torch.int32),
    ),
)
def _sort_rows(
    x: Tensor, weights: Tensor, sizes: Sequence[int], order: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _row_order(sizes, order).to(x.device)
    return x.index_select(0, rows), weights[rows], rows.int()


@operator(
    "spbench::sort_rows_backward",
    fake=lambda d_y, d_weights, rows: (torch.empty_like(d_y), torch.empty_like(d_weights)),
)
def _sort_rows_backward(d_y: Tensor, d_weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    d_x, d_w = torch.empty_like(d_y), torch.empty_like(d_weights)
    d_x[rows.long()] = d_y
    d_w[rows.long()] = d_weights
    return d_x, d_w


_SORT_ROWS = differentiable(
    _sort_rows,
    lambda d_y, d_w, rows: _sort_rows_backward(d_y.contiguous(), d_w.contiguous(), rows),
    lambda *arguments_and_results: arguments_and_results[-1:],
    results=2,
)


def reordered(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Returns the rows of x [R, ...] with its chunks of ``sizes`` rows put in another order, by a split and a
    concatenation, as Megatron-LM's sort_chunks_by_idxs does."""
    return torch.cat(_chunks(x, sizes, order))


def sort_chunks(
    x: Tensor, weights: Tensor | None, sizes: Sequence[int], order: Sequence[int], way: str
) -> tuple[Tensor, Tensor]:
    """Returns x [R, H] and weights [R] (or [R, 0]) with chunks of ``sizes`` rows put in another order."""
    row_weights = x.new_empty(len(x), 0) if weights is None else weights
    if way == "fused":
        return _SORT_ROWS(x, row_weights, tuple(sizes), tuple(order))
    return reordered(x, sizes, order), reordered(row_weights, sizes, order)


def by_index(x: Tensor, sizes: Sequence[int], order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x [R, H] with chunks of ``sizes`` rows put in another order by an index of a copy, the index [R])."""
    places = reordered(torch.arange(len(x), device=x.device), sizes, order)
    return torch.cat((x, x.new_zeros(1, x.shape[1])))[places], places


def back_by_index(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [R, H] in the order that they had before :func:`by_index`."""
    y = rows.new_empty(len(rows) + 1, rows.shape[1])
    y[places] = rows
    return y[:-1]
