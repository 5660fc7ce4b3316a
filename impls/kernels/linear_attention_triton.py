"""The operators of :mod:`spbench.impls.kernels.linear_attention` for GPUs: two Triton kernels and a scan.

Every result has one of two forms. At a boundary of blocks, a kernel sums x_i^T y_i over the positions of a
block, decayed to the boundary, and a scan adds up the blocks. States have this form, and their gradients with
a scan from the other end. At a position, with x its own row and y and w the earlier rows of its block,

    out_i = sum over j <= i of exp(-s (i - j)) (x_i . y_j) w_j  +  exp(-s (i - start + 1)) x_i state

which is the output for x, y, w = q, k, v, and the gradient of q for d_o, v, k and the state transposed. From
the end of the block, it is the gradient of k for v, d_o, q and of v for k, q, d_o. Sums are float32.
"""

# arguments of kernels have no types before they are compiled
# mypy: allow-incomplete-defs, disable-error-code="union-attr"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spbench.impls.kernels.linear_attention import TILE

#: columns of a result's tile for each warp; with more, the sums do not fit in 255 registers a thread
COLUMNS_PER_WARP = 16
#: elements of a state that one program of the scan computes
SCANNED = 512


@triton.jit
def _rate(rates, head):
    if rates is None:
        rate = 0.0
    else:
        rate = tl.load(rates + head).to(tl.float32)
    return rate


@triton.jit
def _rows(x, position, end, column, stride, WIDTH: tl.constexpr):
    """Loads the rows ``position`` and columns ``column`` of x [L, WIDTH], zero from row ``end`` on."""
    inside = (position < end)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + position.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _boundaries(
    x, y, states, rates, length, block, heads, count,
    x_batch, x_head, x_row, y_batch, y_head, y_row,
    K: tl.constexpr, N: tl.constexpr, BACKWARD: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    TL: tl.constexpr, TK: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Write a tile [TK, TN] of block c's addition to the next state (BACKWARD: to the gradient before c)."""
    c, tile, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tile // tl.cdiv(N, TN) * TK + tl.arange(0, TK)
    column = tile % tl.cdiv(N, TN) * TN + tl.arange(0, TN)
    rate = _rate(rates, pair % heads)
    x += pair // heads * x_batch + pair % heads * x_head
    y += pair // heads * y_batch + pair % heads * y_head
    start = c * block
    end = tl.minimum(start + block, length)

    total = tl.zeros((TK, TN), tl.float32)
    for first in range(start, end, TL):
        position = first + tl.arange(0, TL)
        if BACKWARD:
            distance = position - start + 1
        else:
            distance = tl.maximum(end - 1 - position, 0)
        power = tl.exp(-rate * distance.to(tl.float32))
        a = _rows(x, position, end, row, x_row, K).to(tl.float32) * power[:, None]
        b = _rows(y, position, end, column, y_row, N).to(OPERAND)
        total = tl.dot(tl.trans(a.to(OPERAND)), b, total, input_precision=PRECISION)

    boundary = c if BACKWARD else c + 1
    states += (pair * (count + 1) + boundary) * (K * N)
    inside = (row < K)[:, None] & (column < N)[None, :]
    tl.store(states + row[:, None] * N + column[None, :], total, mask=inside)


@triton.jit
def _scan(
    states, rates, length, block, heads, count, SIZE: tl.constexpr, BACKWARD: tl.constexpr, TS: tl.constexpr
):
    """Add up the sums of blocks in place, with decay from boundary to boundary; the first state is zero."""
    pair = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * TS + tl.arange(0, TS)
    rate = _rate(rates, pair % heads)
    states += pair * (count + 1) * SIZE + number
    state = tl.zeros((TS,), tl.float32)
    tl.store(states + (count if BACKWARD else 0) * SIZE, state, mask=number < SIZE)
    for step in range(count):
        c = count - 1 - step if BACKWARD else step
        here = states + (c if BACKWARD else c + 1).to(tl.int64) * SIZE
        positions = tl.minimum(block, length - c * block)
        own = tl.load(here, mask=number < SIZE, other=0.0)
        state = state * tl.exp(-rate * positions.to(tl.float32)) + own
        tl.store(here, state, mask=number < SIZE)


@triton.jit
def _scores(
    x, y, position, there, end, rate, x_row, y_row,
    K: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr, TL: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """The scores x[position] . y[there] [TL, TL], decayed by distance; zero where ``there`` is after
    ``position`` (BACKWARD: before ``position``)."""
    scores = tl.zeros((TL, TL), tl.float32)
    for k in tl.static_range(0, K, TK):
        row = k + tl.arange(0, TK)
        own = _rows(x, position, end, row, x_row, K)
        others = _rows(y, there, end, row, y_row, K)
        scores = tl.dot(own, tl.trans(others), scores, input_precision=PRECISION)
    if BACKWARD:
        distance = there[None, :] - position[:, None]
    else:
        distance = position[:, None] - there[None, :]
    # the power of a position on the other side would overflow
    power = tl.exp(-rate * tl.maximum(distance, 0).to(tl.float32))
    return tl.where(distance >= 0, scores * power, 0.0)


@triton.jit
def _positions(
    x, y, w, out, states, passed, rates, length, block, heads, count, tiles,
    x_batch, x_head, x_row, y_batch, y_head, y_row, w_batch, w_head, w_row, state_row, state_column,
    K: tl.constexpr, N: tl.constexpr, BACKWARD: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    TL: tl.constexpr, TK: tl.constexpr, TN: tl.constexpr,
):  # fmt: skip
    """Write out, the module's second form, at TL positions and TN columns; x, y [L, K], w, out [L, N].

    ``passed`` is the state [K, N] before the sequence (BACKWARD: the final state's gradient), or None.
    """
    c, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    pair = tl.program_id(2).to(tl.int64)
    rate = _rate(rates, pair % heads)
    x += pair // heads * x_batch + pair % heads * x_head
    y += pair // heads * y_batch + pair % heads * y_head
    w += pair // heads * w_batch + pair % heads * w_head
    start = c * block
    end = tl.minimum(start + block, length)
    position = start + tile * TL + tl.arange(0, TL)
    column = tl.program_id(1) * TN + tl.arange(0, TN)

    if BACKWARD:
        boundary, to_passed, to_boundary = c + 1, length - end, tl.maximum(end - 1 - position, 0)
    else:
        boundary, to_passed, to_boundary = c, start, position - start + 1
    states += (pair * (count + 1) + boundary) * (K * N)
    passed_power = tl.exp(-rate * to_passed.to(tl.float32))
    total = tl.zeros((TL, TN), tl.float32)
    for k in tl.static_range(0, K, TK):
        row = k + tl.arange(0, TK)
        inside = (row < K)[:, None] & (column < N)[None, :]
        at = row[:, None] * state_row + column[None, :] * state_column
        state = tl.load(states + at, mask=inside, other=0.0)
        if passed is not None:
            state += passed_power * tl.load(passed + pair * (K * N) + at, mask=inside, other=0.0)
        a = _rows(x, position, end, row, x_row, K).to(OPERAND)
        total = tl.dot(a, state.to(OPERAND), total, input_precision=PRECISION)
    total *= tl.exp(-rate * to_boundary.to(tl.float32))[:, None]

    # tiles of the block on this side of the diagonal
    first = tile if BACKWARD else 0
    last = tl.cdiv(end - start, TL) if BACKWARD else tile + 1
    for other in range(first, last):
        there = start + other * TL + tl.arange(0, TL)
        scores = _scores(
            x, y, position, there, end, rate, x_row, y_row,
            K=K, BACKWARD=BACKWARD, PRECISION=PRECISION, TL=TL, TK=TK,
        )  # fmt: skip
        b = _rows(w, there, end, column, w_row, N).to(OPERAND)
        total = tl.dot(scores.to(OPERAND), b, total, input_precision=PRECISION)

    out += pair * length * N
    inside = (position < end)[:, None] & (column < N)[None, :]
    tl.store(out + position.to(tl.int64)[:, None] * N + column[None, :], total, mask=inside)


def _settings(x: Tensor, n: int, columns: int) -> dict[str, Any]:
    """Tile sizes (at most ``columns`` times TILE wide) and precision of kernels for x [..., K] and N columns.

    Sums of products of float16 inputs exceed float16's range. So kernels keep computed operands in float32
    and multiply in TF32, whose mantissa is as long as float16's. Kernels multiply float32 inputs without
    tensor cores, in registers, which hold smaller tiles.
    """
    full = x.dtype is torch.float32
    tile = TILE // 2 if full else TILE
    tk, tn = (
        max(16, min(most, triton.next_power_of_2(width)))
        for width, most in ((x.shape[-1], tile), (n, columns * tile))
    )
    return {
        "K": x.shape[-1],
        "N": n,
        "TL": tile,
        "TK": tk,
        "TN": tn,
        "num_warps": max(4, tn // COLUMNS_PER_WARP),
        "OPERAND": tl.bfloat16 if x.dtype is torch.bfloat16 else tl.float32,
        "PRECISION": "ieee" if full else "tf32",
    }


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _at_boundaries(x: Tensor, y: Tensor, decay: Tensor | None, block: int, *, backward: bool) -> Tensor:
    x, y = _dense(x), _dense(y)
    (batch, heads, length, k), n = x.shape, y.shape[-1]
    count = triton.cdiv(length, block)
    states = x.new_empty(batch, heads, count + 1, k, n, dtype=torch.float32)
    # no bfloat16 operands here: reading x and y takes longer than multiplying them in TF32, and a state
    # goes on to all later positions
    settings = _settings(x, n, 1) | {"OPERAND": tl.float32}
    tiles = triton.cdiv(k, settings["TK"]) * triton.cdiv(n, settings["TN"])
    shared = length, block, heads, count
    with torch.cuda.device_of(x):
        _boundaries[count, tiles, batch * heads](
            *(x, y, states, decay), *shared, *x.stride()[:3], *y.stride()[:3], BACKWARD=backward, **settings
        )
        _scan[triton.cdiv(k * n, SCANNED), batch * heads](
            states, decay, *shared, SIZE=k * n, BACKWARD=backward, TS=SCANNED
        )
    return states


def _at_positions(
    rows: tuple[Tensor, Tensor, Tensor],
    decay: Tensor | None,
    states: Tensor,
    passed: Tensor | None,
    block: int,
    *,
    backward: bool,
    transposed: bool,
) -> Tensor:
    x, y, w = (_dense(row) for row in rows)
    (batch, heads, length, k), n = x.shape, w.shape[-1]
    out = torch.empty_like(w, memory_format=torch.contiguous_format)
    # wide tiles, because the scores are computed again for each tile of columns
    settings = _settings(x, n, 2)
    count, tiles = triton.cdiv(length, block), triton.cdiv(min(block, length), settings["TL"])
    with torch.cuda.device_of(x):
        _positions[count * tiles, triton.cdiv(n, settings["TN"]), batch * heads](
            x, y, w, out, states.contiguous(), None if passed is None else passed.contiguous(), decay,
            length, block, heads, count, tiles,
            *x.stride()[:3], *y.stride()[:3], *w.stride()[:3], *((1, k) if transposed else (n, 1)),
            BACKWARD=backward, **settings,
        )  # fmt: skip
    return out


def states(k: Tensor, v: Tensor, decay: Tensor | None, block: int) -> Tensor:
    """The states at the boundaries of blocks [B, Z, C+1, D, A], from k [B, Z, L, D] and v [B, Z, L, A]."""
    return _at_boundaries(k, v, decay, block, backward=False)


def output(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, states: Tensor, initial: Tensor | None, block: int
) -> Tensor:
    """o [B, Z, L, A] of q, k [B, Z, L, D], v [B, Z, L, A], boundaries' states and the initial state."""
    return _at_positions((q, k, v), decay, states, initial, block, backward=False, transposed=False)


def state_gradients(q: Tensor, d_o: Tensor, decay: Tensor | None, block: int) -> Tensor:
    """The gradients of boundaries' states [B, Z, C+1, D, A], from q [B, Z, L, D] and d_o [B, Z, L, A]."""
    return _at_boundaries(q, d_o, decay, block, backward=True)


def input_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    decay: Tensor | None,
    states: Tensor,
    initial: Tensor | None,
    d_states: Tensor,
    d_final: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    d_q = _at_positions((d_o, v, k), decay, states, initial, block, backward=False, transposed=True)
    d_k = _at_positions((v, d_o, q), decay, d_states, d_final, block, backward=True, transposed=True)
    d_v = _at_positions((k, q, d_o), decay, d_states, d_final, block, backward=True, transposed=False)
    return d_q, d_k, d_v
