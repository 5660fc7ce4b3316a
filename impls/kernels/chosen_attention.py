"""Attention of each query to a few chosen keys: DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556,
section 2.1) and DeepSeek-V4's attention to blocks, as operators.

An indexer with J small heads scores each key s for each query t, and a query attends to its K best keys:

    I_ts = sum over j of w_tj ReLU(q_tj . k_s)

Kernels that train with it score in float32, hide keys that a query may not see, and return positions
(DeepGEMM's fp8_mqa_logits with a first and a last key for each query). All heads of attention share the
chosen keys, which are rows of the latent of keys and values (FlashMLA's sparse prefill, tilelang's
sparse_mla_bwd). Of two equal scores the earlier position is chosen; a query that sees fewer than K keys has
-1 in the remaining places.

In DeepSeek-V4 a key stands for a block of m positions, which a query sees from the block's last position on.
Each query also attends to the W positions up to its own, and each head has a sink
(:mod:`spbench.impls.kernels.sinks`). The rows of positions and blocks lie in one tensor, as in DeepSeek's own
sparse_attn.

Shape letters: B batch, M queries, L keys, Z heads; J heads of the indexer with D features each; F features
of a row, of which the first C are the value; K chosen keys. Sums are in float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.attended import Attended
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.flash_attention import operator
from spbench.impls.kernels.kept_results import kept
from spbench.impls.kernels.sinks import join_sinks, sinks_gradient

#: "chosen": only the chosen rows are read; "masked": all scores are in memory, the indexer's for each of its
#: heads too, and a mask hides the rows that are not chosen (transformers' eager attention)
WAYS = ("chosen", "masked")

#: the operators of attention to chosen rows, by their names
SPARSE_ATTENTION = ("sparse_attention", "sparse_attention_backward")

#: queries whose chosen rows a device without a kernel of its own gathers at once
_TILE = 64


class Index(NamedTuple):
    """What the indexer makes of a rank's positions: queries [B, M, J, D], keys [B, M or L, D], and the heads'
    weights [B, M, J] times J**-0.5 D**-0.5."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


class Choice(NamedTuple):
    """How keys are chosen and attended to.

    Attributes:
        most: K, the most keys of a query.
        tile: the most queries of a rank whose index scores are in memory at once; 0: all.
        way: one of :data:`WAYS`.
        values: C.
        scale: the factor of attention's scores.
        attended: the positions that a query may see.
        block: m, the positions for which a key stands.
    """

    most: int
    tile: int
    way: str
    values: int
    scale: float
    attended: Attended
    block: int = 1


class Near(NamedTuple):
    """What queries attend to besides chosen rows: the rows [B, W - 1 + M, F] of the W - 1 positions before a
    rank's own M and of these, and the heads' sinks [Z]."""

    rows: Tensor
    sinks: Tensor


def _hidden(bounds: Tensor, keys: int) -> Tensor:
    """The mask [M, keys], True where a query does not see a key; bounds [M, 2]: its first and last key."""
    position = torch.arange(keys, device=bounds.device)
    return (position < bounds[:, :1]) | (position > bounds[:, 1:])


def _index_scores(q: Tensor, k: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    precise = state_dtype(q.dtype)
    keys = k.to(precise).mT
    scores = torch.zeros(*q.shape[:2], k.shape[1], dtype=precise, device=q.device)
    for head in range(q.shape[2]):  # one head at a time, as kernels keep no scores by head
        of_head = (q[:, :, head].to(precise) @ keys).relu_()
        scores.addcmul_(of_head, weights[:, :, head, None].to(precise))
    return scores.masked_fill_(_hidden(bounds, k.shape[1]), -torch.inf)


#: (q [B, M, J, D], k [B, L, D], weights [B, M, J], bounds [M, 2]) -> scores [B, M, L], -inf for hidden keys
index_scores = operator(
    "index_scores(Tensor q, Tensor k, Tensor weights, Tensor bounds) -> Tensor",
    _index_scores,
    lambda q, k, weights, bounds: q.new_empty(*q.shape[:2], k.shape[1], dtype=state_dtype(q.dtype)),
)


def _best_positions(scores: Tensor, count: int) -> Tensor:
    # topk does not say which of equal scores it takes
    best, positions = scores.sort(dim=-1, descending=True, stable=True)
    best, positions = best[..., :count], positions[..., :count]
    chosen = torch.where(best > -torch.inf, positions, -1)
    return chosen.to(torch.int32, memory_format=torch.contiguous_format)


#: (scores [B, M, L], K) -> positions [B, M, K] in int32, the best first
best_positions = operator(
    "best_positions(Tensor scores, int count) -> Tensor",
    _best_positions,
    lambda scores, count: scores.new_empty(*scores.shape[:2], count, dtype=torch.int32),
)


def _rows_of(rows: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen rows [B, m, K, F] in full precision, and the mask [B, m, 1, K] of places without a key."""
    batch = torch.arange(len(rows), device=rows.device).view(-1, 1, 1)
    return rows[batch, chosen.clamp(min=0).long()].to(state_dtype(rows.dtype)), (chosen < 0).unsqueeze(2)


def _tiles(queries: int) -> list[slice]:
    return [slice(first, first + _TILE) for first in range(0, queries, _TILE)]


def _forward(q: Tensor, rows: Tensor, chosen: Tensor, scale: float, values: int) -> tuple[Tensor, Tensor]:
    o, lse = _fake_forward(q, rows, chosen, scale, values)
    for tile in _tiles(q.shape[1]):
        keys, hidden = _rows_of(rows, chosen[:, tile])
        scores = (q[:, tile].to(keys.dtype) @ keys.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
        lse[:, tile] = sums = scores.logsumexp(-1)
        o[:, tile] = (scores.sub_(sums.unsqueeze(-1)).exp_() @ keys[..., :values]).to(o.dtype)
    return o, lse


def _fake_forward(
    q: Tensor, rows: Tensor, chosen: Tensor, scale: float, values: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], values), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _backward(
    d_o: Tensor,
    q: Tensor,
    rows: Tensor,
    chosen: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    values: int,
) -> tuple[Tensor, Tensor]:
    d_q, d_rows = _fake_backward(d_o, q, rows)
    d_rows.zero_()
    for tile in _tiles(q.shape[1]):
        keys, hidden = _rows_of(rows, chosen[:, tile])
        queries, d_out, out = (x[:, tile].to(keys.dtype) for x in (q, d_o, o))
        p = (queries @ keys.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
        p.sub_(lse[:, tile].unsqueeze(-1)).exp_()
        share = (d_out * out).sum(-1, keepdim=True)
        d_scores = (d_out @ keys[..., :values].mT).sub_(share).mul_(p).mul_(scale)
        d_q[:, tile] = (d_scores @ keys).to(d_q.dtype)
        d_keys = d_scores.mT @ queries
        d_keys[..., :values] += p.mT @ d_out
        for sums, places, gradients in zip(d_rows, chosen[:, tile], d_keys, strict=True):
            sums.index_add_(0, places.clamp(min=0).flatten(), gradients.flatten(0, 1))
    return d_q, d_rows


def _fake_backward(d_o: Tensor, q: Tensor, rows: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    # kernels add to rows of float32 from all queries at once
    return torch.empty_like(q), rows.new_empty(rows.shape, dtype=state_dtype(rows.dtype))


#: (q [B, M, Z, F], rows [B, L, F], chosen [B, M, K], scale, C) -> (o [B, M, Z, C], lse [B, M, Z])
sparse_attention = operator(
    "sparse_attention(Tensor q, Tensor rows, Tensor chosen, float scale, int values) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
#: (d_o, q, rows, chosen, o, lse, scale, C) -> the gradients of q, and of rows in full precision
sparse_attention_backward = operator(
    "sparse_attention_backward(Tensor d_o, Tensor q, Tensor rows, Tensor chosen, Tensor o, Tensor lse,"
    " float scale, int values) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)

Shape = Sequence[int]


@register_flop_formula(torch.ops.spbench.index_scores)
def _index_flops(q: Shape, k: Shape, *_: Any, **__: Any) -> int:
    # each query meets each key; of each head one matmul, and the sum over heads
    return 2 * q[0] * q[1] * q[2] * k[1] * (q[3] + 1)


@register_flop_formula(torch.ops.spbench.sparse_attention)
def _forward_flops(q: Shape, rows: Shape, chosen: Shape, scale: float, values: int, **_: Any) -> int:
    return 2 * q[0] * q[1] * q[2] * chosen[2] * (q[3] + values)


@register_flop_formula(torch.ops.spbench.sparse_attention_backward)
def _backward_flops(d_o: Shape, q: Shape, rows: Shape, chosen: Shape, *_: Any, **__: Any) -> int:
    # the scores again, d_q and the rows' gradient as keys; the probabilities' gradient and that as values
    return 2 * q[0] * q[1] * q[2] * chosen[2] * (3 * q[3] + 2 * d_o[3])


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, chosen: Tensor, scale: float, values: int, sinks: Tensor | None
    ) -> Tensor:
        def attended() -> tuple[Tensor, Tensor]:
            o, lse = sparse_attention(q, rows, chosen, scale, values)
            return o, lse if sinks is None else join_sinks(o.transpose(1, 2), lse.mT, sinks).mT

        o, lse = kept(attended)
        ctx.save_for_backward(q, rows, chosen, o, lse, sinks)
        ctx.sizes = scale, values
        result: Tensor = o
        return result

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        *others, o, lse, sinks = ctx.saved_tensors
        by_head = [x.transpose(1, 2) for x in (d_o, o, lse)]
        d_sinks = None if sinks is None else sinks_gradient(*by_head, sinks)
        d_q, d_rows = sparse_attention_backward(d_o.contiguous(), *others, o, lse.contiguous(), *ctx.sizes)
        return d_q, d_rows.to(others[1].dtype), None, None, None, d_sinks


def seen_bounds(attended: Attended, first: int, count: int, device: torch.device, block: int = 1) -> Tensor:
    """The first and the last key [count, 2] that the queries at ``first``, ``first`` + 1, ... see, where a
    key stands for ``block`` positions; a last key of -1: the query sees none."""
    last = torch.arange(first, first + count, device=device)
    if block > 1:
        last = (last + 1) // block - 1
    starts = torch.zeros_like(last)
    if attended.documents:
        ends = torch.tensor(attended.ends, device=device)
        begins = torch.cat((ends.new_zeros(1), ends))
        starts = begins[torch.bucketize(last, ends, right=True)]
    return torch.stack((starts, last), 1)


@torch.no_grad()
def chosen_positions(index: Index, how: Choice, first: int = 0) -> Tensor:
    """The positions [B, M, min(K, L)] in int32 of the keys that queries at ``first``, ``first`` + 1, ...
    choose of index keys [B, L, D], whose order is that of positions."""
    (queries, keys, weights), length = index, index.queries.shape[1]
    bounds = seen_bounds(how.attended, first, length, keys.device, how.block)
    count = min(how.most, keys.shape[1])
    if how.way == "masked":
        precise = state_dtype(queries.dtype)
        by_head = torch.matmul(queries.to(precise), keys.to(precise).mT.unsqueeze(1)).relu_()
        scores = torch.matmul(weights.to(precise).unsqueeze(-2), by_head).squeeze(-2)
        return best_positions(scores.masked_fill_(_hidden(bounds, keys.shape[1]), -torch.inf), count)
    positions = []
    for start in range(0, length, how.tile or length):
        tile = slice(start, start + (how.tile or length))
        scores = index_scores(queries[:, tile], keys, weights[:, tile], bounds[tile])
        positions.append(best_positions(scores, count))
        del scores
    return positions[0] if len(positions) == 1 else torch.cat(positions, 1)


def _places(
    q: Tensor, rows: Tensor | None, index: Index | None, how: Choice, first: int, near: Near | None
) -> Iterator[Tensor]:
    """The places [B, M, ...] of each query's keys in ``near.rows`` and then in ``rows``, -1 for none; without
    an index the query has all keys that it sees."""
    queries, offset = q.shape[1], 0 if near is None else near.rows.shape[1]
    if near is not None:
        own = torch.arange(queries, device=q.device).view(-1, 1)
        places = own + torch.arange(offset - queries + 1, device=q.device)
        # before the first position there are rows of none
        yield torch.where(places < offset - queries - first, -1, places).expand(len(q), -1, -1)
    if rows is None:
        return
    if index is None:
        bounds = seen_bounds(how.attended, first, queries, q.device, how.block)
        chosen = torch.arange(rows.shape[1], device=q.device).masked_fill(_hidden(bounds, rows.shape[1]), -1)
    else:
        chosen = chosen_positions(index, how, first)
    yield (torch.where(chosen < 0, chosen, chosen + offset) if offset else chosen).expand(len(q), -1, -1)


def attention_to_chosen(
    q: Tensor, rows: Tensor | None, index: Index | None, how: Choice, first: int = 0, near: Near | None = None
) -> Tensor:
    """Softmax attention of queries q [B, M, Z, F] at the positions from ``first`` on to the rows [B, L, F]
    that ``index`` chooses (None: all that a query sees), and to those of ``near`` -> [B, M, Z, C]. Choosing
    has no gradient. Backward keeps q, rows, their places, o and lse."""
    places = [x.to(torch.int32) for x in _places(q, rows, index, how, first, near)]
    chosen = places[0] if len(places) == 1 else torch.cat(places, -1)
    parts = [x for x in (near and near.rows, rows) if x is not None]
    of_all, sinks = parts[0] if len(parts) == 1 else torch.cat(parts, 1), near and near.sinks
    if how.way == "chosen":
        result: Tensor = _SparseAttention.apply(q, of_all, chosen, how.scale, how.values, sinks)
        return result
    scores = torch.einsum("bmzf,blf->bmzl", q, of_all) * how.scale
    beyond = torch.where(chosen < 0, of_all.shape[1], chosen).long()  # one more row for places without a key
    hidden = torch.ones(*chosen.shape[:2], of_all.shape[1] + 1, dtype=torch.bool, device=q.device)
    hidden = hidden.scatter_(-1, beyond, False)[..., :-1].unsqueeze(2)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1).expand(*q.shape[:3], 1)), -1)
    p = scores.softmax(-1)[..., : of_all.shape[1]]
    return torch.einsum("bmzl,blc->bmzc", p, of_all[..., : how.values])
