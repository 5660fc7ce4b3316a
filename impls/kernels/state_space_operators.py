"""The operators of the state space duality's forward and backward passes. Shapes and letters are those of
:mod:`spbench.impls.kernels.state_space`; ``sums`` are a block's sums of g up to each position."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels import recurrence_blocks
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.operator import operator
from spbench.impls.kernels.recurrence_blocks import BlockDecay, Blocks, block_sums

#: positions in a block: chunk_size of Nemotron-H's config.json and of Megatron-Core's MambaMixer
BLOCK = 128

OPS = torch.ops.spbench


def _block(x: Tensor) -> int:
    return min(BLOCK, x.shape[1])


def _split(heads: int, *tensors: Tensor) -> list[Tensor]:
    return [Blocks(x.shape[1], _block(x)).of(x, heads) for x in tensors]


def _together(x: Tensor, like: Tensor) -> Tensor:
    """Returns x [B, Z, C, block, ...], in the form of :func:`_split`, in the shape and dtype of ``like``."""
    return Blocks(like.shape[1], _block(like)).back(x, like)


def _decay(sums: Tensor, starts: Sequence[int]) -> BlockDecay:
    return BlockDecay(sums, Blocks(sums.shape[1], _block(sums), starts))


def summed(g: Tensor, from_end: bool = False) -> Tensor:
    """Sums of g [B, L, Z] over blocks; these go on over documents, as no pair uses a first decay."""
    return block_sums(g, _block(g), from_end, [])


def _for_heads(scores: Tensor, heads: int) -> Tensor:
    return scores.repeat_interleave(heads // scores.shape[1], 1)


@operator("spbench::state_space_scores")
def scores(q: Tensor, k: Tensor) -> Tensor:
    """The scores q k^T of all pairs of positions of each block [B, G, C, block, block]."""
    queries, keys = _split(q.shape[2], q, k)
    return queries @ keys.mT


@operator(
    "spbench::state_space_block_states", fake=lambda k, v, sums, *_: sums.new_empty(_states_shape(k, v))
)
def block_states(k: Tensor, v: Tensor, sums: Tensor, b: Tensor, starts: Sequence[int]) -> Tensor:
    """The state that each block's own positions add to the state after the block [B, Z, C, D, A]."""
    keys, values, strength = _split(v.shape[2], k, v, b)
    return (keys * strength.unsqueeze(-1) * _decay(sums, starts).to_end).mT @ values


@operator(
    "spbench::state_space_carry",
    fake=lambda states, *_: states.new_empty(*states.shape[:2], states.shape[-2] * states.shape[-1] + 1),
)
def carry(states: Tensor, sums: Tensor, backward: bool, starts: Sequence[int]) -> Tensor:
    """The map of all blocks [B, Z, D A + 1], from the ``states`` [B, Z, C, D, A] that each block adds to the
    state after it (``backward``: to the gradient of the state before it)."""
    across, state, blocks = (
        _decay(sums, starts).across,
        torch.zeros_like(states[:, :, 0]),
        range(states.shape[2]),
    )
    for c in reversed(blocks) if backward else blocks:
        state = across[:, :, c] * state + states[:, :, c]
    return torch.cat((state.flatten(2), across.prod(2).squeeze(-1)), -1)


@operator(
    "spbench::state_space_passed",
    fake=lambda states, sums, first, like, *_: states.new_empty(states.shape, dtype=like.dtype),
)
def passed(
    states: Tensor, sums: Tensor, first: Tensor | None, like: Tensor, backward: bool, starts: Sequence[int]
) -> Tensor:
    """The state before each block (``backward``: the gradient of the state after each) [B, Z, C, D, A] in the
    dtype of ``like``; ``states`` are as in :func:`carry`, ``first`` is the first state (None: 0)."""
    across, state = _decay(sums, starts).across, torch.zeros_like(states[:, :, 0]) if first is None else first
    passed, blocks = [state] * states.shape[2], range(states.shape[2])
    for c in reversed(blocks) if backward else blocks:
        passed[c] = state
        state = across[:, :, c] * state + states[:, :, c]
    return torch.stack(passed, 2).to(like.dtype)


@operator("spbench::state_space_output", fake=lambda scores, q, v, *_: v.new_empty(v.shape))
def output(
    scores: Tensor, q: Tensor, v: Tensor, sums: Tensor, b: Tensor, states: Tensor, starts: Sequence[int]
) -> Tensor:
    """o [B, L, Z, A] from the scores of each block and the state before each block."""
    (queries, values, strength), decay = _split(v.shape[2], q, v, b), _decay(sums, starts)
    pairs = _for_heads(scores, v.shape[2]) * decay.between() * strength.unsqueeze(-2)
    return _together(decay.from_start * queries @ states.to(pairs.dtype) + pairs @ values, v)


@operator(
    "spbench::state_space_output_state_gradients",
    fake=lambda q, d_o, sums, *_: sums.new_empty(_states_shape(q, d_o)),
)
def output_state_gradients(q: Tensor, d_o: Tensor, sums: Tensor, starts: Sequence[int]) -> Tensor:
    """The part of the gradient of the state before each block from this block's outputs [B, Z, C, D, A]."""
    queries, d_outputs = _split(d_o.shape[2], q, d_o)
    return (_decay(sums, starts).from_start * queries).mT @ d_outputs


def shares(heads: int, groups: int, blocks: int, processors: int) -> int:
    """The number of shares into which backward's kernels divide a group's heads, so that each multiprocessor
    of a card has work (nsplits of mamba_ssm's ssd_chunk_state.py and ssd_chunk_scan.py). ``blocks`` counts
    the blocks of all sequences; 0 ``processors``, no card, gives one share."""
    of_group = heads // groups
    together = max(min(math.ceil(blocks * heads / processors), of_group), 1) if processors else of_group
    return math.ceil(of_group / together)


def _shared_out(x: Tensor, groups: int, count: int) -> Tensor:
    """The sums of x [B, Z, ...] over each share of a group's heads [B, shares, G, ...]."""
    x = x.unflatten(1, (groups, -1))
    together = math.ceil(x.shape[2] / count)
    x = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, count * together - x.shape[2]))
    return x.unflatten(2, (count, together)).sum(3).transpose(1, 2).contiguous()


@operator("spbench::state_space_score_gradients")
def score_gradients(
    v: Tensor, d_o: Tensor, sums: Tensor, b: Tensor, groups: int, count: int, starts: Sequence[int]
) -> Tensor:
    """The gradient of the scores, summed over each share of heads [B, shares, G, C, block, block]."""
    values, d_outputs, strength = _split(v.shape[2], v, d_o, b)
    d_pairs = d_outputs @ values.mT * _decay(sums, starts).between() * strength.unsqueeze(-2)
    return _shared_out(d_pairs, groups, count)


@operator(
    "spbench::state_space_key_gradients",
    fake=lambda k, v, sums, b, d_states, count, *_: _of_shares(k, sums, count),
)
def key_gradients(
    k: Tensor, v: Tensor, sums: Tensor, b: Tensor, d_states: Tensor, count: int, starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The parts of two gradients that come through the state after a block: of keys, summed over each share
    of heads, in the states' dtype [B, shares, G, C, block, D], and of b [B, Z, C, block]."""
    keys, values, strength = _split(v.shape[2], k, v, b)
    d_written = _decay(sums, starts).to_end * (values @ d_states.to(values.dtype).mT)
    of_keys = _shared_out(strength.unsqueeze(-1) * d_written, k.shape[2], count)
    return of_keys, (keys * d_written).sum(-1)


@operator(
    "spbench::state_space_query_gradients",
    fake=lambda q, sums, d_o, states, count, *_: _of_shares(q, sums, count),
)
def query_gradients(
    q: Tensor, sums: Tensor, d_o: Tensor, states: Tensor, count: int, starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """As :func:`key_gradients`, but through the state before a block, of queries and the sums."""
    queries, d_outputs = _split(d_o.shape[2], q, d_o)
    d_read = _decay(sums, starts).from_start * (d_outputs @ states.to(d_outputs.dtype).mT)
    return _shared_out(d_read, q.shape[2], count), (queries * d_read).sum(-1)


@operator(
    "spbench::state_space_input_gradients",
    fake=lambda q, k, v, sums, b, *_: tuple(x.new_empty(x.shape) for x in (q, k, v, sums, b)),
)
def input_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    b: Tensor,
    d_o: Tensor,
    scores: Tensor,
    d_scores: Tensor,
    states: Tensor,
    d_states: Tensor,
    of_states: Sequence[Tensor],
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, the sums and b. ``of_states`` has the results of :func:`query_gradients` and
    then :func:`key_gradients`, summed over shares."""
    heads = v.shape[2]
    keys, values, strength, d_outputs = _split(heads, k, v, b, d_o)
    d_read, of_reading, d_written, of_writing = of_states
    decay, products = _decay(sums, starts), _for_heads(scores, heads)
    between, before, d_after = decay.between(), states.to(products.dtype), d_states.to(products.dtype)
    # gradients without the factor b: through pairs of a block, and through the state after the block
    pairs = d_outputs @ values.mT * products * between
    d_b = pairs.sum(-2) + of_writing
    d_sums = of_reading + (pairs @ strength.unsqueeze(-1)).squeeze(-1) - strength * d_b
    of_ends = (strength * of_writing).sum(-1) + (decay.across * before * d_after).sum((-1, -2))
    decay.add_at_ends(d_sums, of_ends)
    d_v = (products * between).mT @ d_outputs + decay.to_end * keys @ d_after
    # a group of heads shares the scores, so q and k of a group get the scores' gradient once
    q_once, k_once = _split(q.shape[2], q, k)
    return (
        _together(d_read + d_scores @ k_once, q),
        _together(d_written + d_scores.mT @ q_once, k),
        _together(strength.unsqueeze(-1) * d_v, v),
        _together(d_sums, sums),
        _together(d_b, b),
    )


def _states_shape(k: Tensor, v: Tensor) -> list[int]:
    return [len(v), v.shape[2], -(-v.shape[1] // _block(v)), k.shape[-1], v.shape[-1]]


@scores.register_fake
def _(q: Tensor, k: Tensor) -> Tensor:
    block = _block(q)
    return q.new_empty(len(q), q.shape[2], -(-q.shape[1] // block), block, block, dtype=state_dtype(q.dtype))


@score_gradients.register_fake
def _(v: Tensor, d_o: Tensor, sums: Tensor, b: Tensor, groups: int, count: int, *_: Any) -> Tensor:
    block = _block(v)
    return sums.new_empty(len(v), count, groups, -(-v.shape[1] // block), block, block)


def _of_shares(x: Tensor, sums: Tensor, count: int) -> tuple[Tensor, Tensor]:
    block = _block(x)
    blocks = -(-x.shape[1] // block)
    of_shares = sums.new_empty(len(x), count, x.shape[2], blocks, block, x.shape[-1])
    return of_shares, sums.new_empty(len(x), sums.shape[2], blocks, block)


count_products = partial(recurrence_blocks.count_products, BLOCK)
count_products(OPS.state_space_scores, 0, lambda n, d, a: n * d)
for _operator, _values in (
    (OPS.state_space_block_states, 1),
    (OPS.state_space_output_state_gradients, 1),
    (OPS.state_space_key_gradients, 1),
    (OPS.state_space_query_gradients, 2),
):
    count_products(_operator, _values, lambda n, d, a: d * a)
# tiles above the diagonal are left out
count_products(OPS.state_space_output, 2, lambda n, d, a: a * (n // 2 + d), features=1)
count_products(OPS.state_space_score_gradients, 0, lambda n, d, a: a * n)


@register_flop_formula(OPS.state_space_input_gradients)
def _input_gradient_flops(q: Sequence[int], k: Any, v: Sequence[int], *_: Any, **__: Any) -> int:
    batch, length, heads, a = v
    block, d = min(BLOCK, length), q[-1]
    # for each head: d_v within the block and through the state, d_o v^T once more for the decay
    # (_chunk_scan_bwd_ddAcs_stable); for each group: d_q and d_k from the scores
    of_heads = heads * (a * (block // 2 + d) + a * block // 2)
    return 2 * batch * length * (of_heads + 2 * q[2] * block * d)
