"""Causal linear attention with exponential decay per head, in blocks, as operators.

    S_t = exp(-s) S_(t-1) + k_t^T v_t        o_t = q_t S_t

Inside a block of positions the output comes from the masked matmul of queries and keys (quadratic in the
block). Earlier positions reach the block only through the state S (linear in the length). Gradients follow
the same two ways (lightning attention, arXiv 2401.04658; over ranks: LASP, arXiv 2404.02882). Shapes: q, k
[B, Z, L, D], v, o [B, Z, L, A], state [B, Z, D, A], in float32 for half precisions; C blocks; decay [Z], each
head's rate s >= 0 a position (None: 0). The kernels for GPUs are in ``linear_attention_triton``.

Every exponent is -s times a distance >= 0: strong decay underflows to zero, and nothing overflows.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels.decay import decay_mask, decay_powers, positions, state_dtype
from spbench.impls.kernels.operator import Operator, operator

#: positions in a block: the fused parallel kernel of LASP's authors keeps a float32 state per 256 positions
BLOCK = 256
#: positions in a tile: kernels go through a block's scores in tiles and leave out tiles above the diagonal
TILE = 64

OPS = torch.ops.spbench


class _Blocks:
    """The places of the blocks of L positions, and the decay between positions and boundaries of blocks.

    Attributes:
        count: C, the number of blocks; the last block may be shorter.
        starts, ends: the first position of each block, and the position after its last [C].
        from_start: decay exp(-s (i + 1)) from the state before a block to its position i [Z, 1, block, 1].
        to_end: decay exp(-s (n - 1 - j)) from position j of n to the state after the block [Z, C, block, 1].
        across: decay exp(-s n) from one boundary to the next [Z, C, 1, 1].
    """

    def __init__(self, x: Tensor, decay: Tensor | None, block: int):
        length = x.shape[2]
        self.block = min(block, length)
        self.count = -(-length // self.block)
        inside = positions(self.block, x)
        self.starts = positions(self.count, x) * self.block
        self.ends = (self.starts + self.block).clamp(max=length)
        lengths = self.ends - self.starts
        to_end = (lengths.unsqueeze(-1) - 1 - inside).clamp_(min=0)  # below 0 lies padding: zeros
        self.from_start = decay_powers(decay, inside + 1)[:, None, :, None]
        self.to_end = decay_powers(decay, to_end.flatten()).unflatten(1, to_end.shape).unsqueeze(-1)
        self.across = decay_powers(decay, lengths)[..., None, None]

    def split(self, x: Tensor) -> Tensor:
        """Returns x [B, Z, L, D] as [B, Z, C, block, D] in the states' dtype, the last padded with zeros."""
        padded = F.pad(x.to(state_dtype(x.dtype)), (0, 0, 0, self.count * self.block - x.shape[2]))
        return padded.unflatten(2, (self.count, self.block))

    def join(self, x: Tensor, like: Tensor) -> Tensor:
        """Returns x [B, Z, C, block, D] as [B, Z, L, D], in the dtype and with the length of ``like``."""
        return x.flatten(2, 3)[:, :, : like.shape[2]].to(like.dtype).contiguous()


def _with_initial(states: Tensor, initial: Tensor | None, decay: Tensor | None, blocks: _Blocks) -> Tensor:
    """The state before each block [B, Z, C, D, A], with the part that comes from the initial state."""
    if initial is None:
        return states[:, :, :-1]
    return states[:, :, :-1] + decay_powers(decay, blocks.starts)[..., None, None] * initial.unsqueeze(2)


def plain_states(k: Tensor, v: Tensor, decay: Tensor | None, block: int) -> Tensor:
    """The states at the boundaries of blocks [B, Z, C+1, D, A], of a sequence whose first state is zero.

    states[c] is the state before block c, and states[C] the state after the last position.
    """
    blocks = _Blocks(k, decay, block)
    own = (blocks.split(k) * blocks.to_end).mT @ blocks.split(v)
    states = [torch.zeros_like(own[:, :, 0])]
    for c in range(blocks.count):
        states.append(states[-1] * blocks.across[:, c] + own[:, :, c])
    return torch.stack(states, 2)


def plain_output(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, states: Tensor, initial: Tensor | None, block: int
) -> Tensor:
    """o [B, Z, L, A] in q's dtype, from :func:`plain_states` and the state before position 0 (None: zero)."""
    blocks = _Blocks(q, decay, block)
    queries = blocks.split(q)
    scores = (queries @ blocks.split(k).mT).mul_(decay_mask(decay, blocks.block, q).unsqueeze(1))
    o = (queries * blocks.from_start) @ _with_initial(states, initial, decay, blocks)
    return blocks.join(o.add_(scores @ blocks.split(v)), q)


def plain_state_gradients(q: Tensor, d_o: Tensor, decay: Tensor | None, block: int) -> Tensor:
    """The gradients of the states at the boundaries of blocks [B, Z, C+1, D, A].

    d_states[c] is the gradient of the state before block c from the outputs of block c and later blocks. So
    d_states[C] is zero, and d_states[0] is the initial state's gradient if nothing uses the final state.
    """
    blocks = _Blocks(q, decay, block)
    own = (blocks.split(q) * blocks.from_start).mT @ blocks.split(d_o)
    gradients = [torch.zeros_like(own[:, :, 0])]
    for c in reversed(range(blocks.count)):
        gradients.append(gradients[-1] * blocks.across[:, c] + own[:, :, c])
    return torch.stack(gradients[::-1], 2)


def plain_input_gradients(
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
    """The gradients of q, k and v, from the gradients of outputs, boundaries' states and final state."""
    blocks = _Blocks(q, decay, block)
    queries, keys, values, d_outputs = (blocks.split(x) for x in (q, k, v, d_o))
    mask = decay_mask(decay, blocks.block, q).unsqueeze(1)
    before = _with_initial(states, initial, decay, blocks)
    d_after = d_states[:, :, 1:]
    if d_final is not None:
        to_final = decay_powers(decay, q.shape[2] - blocks.ends)[..., None, None]
        d_after = d_after + to_final * d_final.unsqueeze(2)

    scores = (queries @ keys.mT).mul_(mask)
    d_scores = (d_outputs @ values.mT).mul_(mask)
    d_q = (d_outputs * blocks.from_start) @ before.mT + d_scores @ keys
    d_k = (values * blocks.to_end) @ d_after.mT + d_scores.mT @ queries
    d_v = (keys * blocks.to_end) @ d_after + scores.mT @ d_outputs
    return blocks.join(d_q, q), blocks.join(d_k, k), blocks.join(d_v, v)


def _operator(plain: Callable[..., Any], in_triton: str) -> Operator:
    """The operator spbench::linear_attention_<in_triton>: Triton on GPUs that have it, else plain torch."""
    made = operator(f"spbench::linear_attention_{in_triton}")(plain)

    def takes(x: Tensor, *_: Any) -> bool:
        return find_spec("triton") is not None and x.dtype is not torch.float64

    @made.register_kernel("cuda", takes)
    def _(*arguments: Any) -> Any:
        # imported only now, because Triton is not on every machine
        return getattr(import_module("spbench.impls.kernels.linear_attention_triton"), in_triton)(*arguments)

    return made


linear_attention_states = _operator(plain_states, "states")
linear_attention_output = _operator(plain_output, "output")
linear_attention_state_gradients = _operator(plain_state_gradients, "state_gradients")
linear_attention_input_gradients = _operator(plain_input_gradients, "input_gradients")


@linear_attention_states.register_fake
@linear_attention_state_gradients.register_fake
def _(x: Tensor, y: Tensor, decay: Tensor | None, block: int) -> Tensor:
    *lead, length, width = x.shape
    boundaries = -(-length // block) + 1
    return x.new_empty(*lead, boundaries, width, y.shape[-1], dtype=state_dtype(x.dtype))


@linear_attention_output.register_fake
def room_for_output(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(v.shape)


@linear_attention_input_gradients.register_fake
def room_for_input_gradients(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def scores_of_blocks(length: int, block: int, documents: Sequence[int] = (), *_: bool) -> int:
    """The number of scores in tiles on and below the diagonals of blocks, of one sequence and head; blocks
    begin anew in each of the ``documents``, if their lengths are given."""

    def in_block(n: int) -> int:
        return sum(min(TILE, n - i) * min(i + TILE, n) for i in range(0, n, TILE))

    return sum(n // block * in_block(block) + in_block(n % block) for n in documents or [length])


@register_flop_formula([OPS.linear_attention_states, OPS.linear_attention_state_gradients])
def boundary_flops(x: Sequence[int], y: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the sums at boundaries, for the shapes x [B, Z, L, D] and y [B, Z, L, A]."""
    batch, heads, length, width = x
    return 2 * batch * heads * length * width * y[-1]


@register_flop_formula(OPS.linear_attention_output)
def output_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **_: Any) -> int:
    """FLOPs of the output, for the shapes q, k [B, Z, L, D] and v [B, Z, L, A]."""
    (batch, heads, length, d), a = q, v[-1]
    return 2 * batch * heads * (scores_of_blocks(length, *rest[3:]) * (d + a) + length * d * a)


@register_flop_formula(OPS.linear_attention_input_gradients)
def input_gradient_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **_: Any) -> int:
    """FLOPs of the gradients of q, k and v, for the shapes of :func:`output_flops`."""
    # q k^T and d_scores; d_q, d_k and d_v inside the block; each of the three through a state
    (batch, heads, length, d), a = q, v[-1]
    return 2 * batch * heads * (scores_of_blocks(length, *rest[6:]) * (3 * d + 2 * a) + 3 * length * d * a)


def final_state(states: Tensor, initial: Tensor | None, decay: Tensor | None, length: int) -> Tensor:
    """The state after ``length`` positions [B, Z, D, A]; ``initial`` is the state before the first."""
    return _carried(states[:, :, -1], initial, decay, length)


def initial_gradient(d_states: Tensor, d_final: Tensor | None, decay: Tensor | None, length: int) -> Tensor:
    """The gradient of the state before the first position, from the gradient of the state after the last."""
    return _carried(d_states[:, :, 0], d_final, decay, length)


def _carried(own: Tensor, other: Tensor | None, decay: Tensor | None, length: int) -> Tensor:
    if other is None:
        return own.clone(memory_format=torch.contiguous_format)  # a view would keep all blocks' states
    return torch.addcmul(own, decay_powers(decay, own.new_full((1,), length)).unsqueeze(-1), other)


def contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor as a contiguous one, which kernels need: a copy where the tensor is a view of a wider one.

    An autograd function keeps its arguments and makes such copies only for its kernels, as LASP's authors do.
    Then a view of a projection that other functions keep anyway costs no memory between forward and backward.
    """
    return tuple(x.contiguous() for x in tensors)


class _ChunkedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, block: int
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values = contiguous(q, k, v)
        states = linear_attention_states(keys, values, decay, block)
        o = linear_attention_output(queries, keys, values, decay, states, initial, block)
        ctx.save_for_backward(q, k, v, decay, states, initial)
        ctx.block = block
        ctx.set_materialize_grads(False)
        return o, final_state(states, initial, decay, q.shape[2])

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, decay, states, initial = ctx.saved_tensors
        q, k, v, d_o = contiguous(q, k, v, torch.zeros_like(v) if d_o is None else d_o)
        d_states = linear_attention_state_gradients(q, d_o, decay, ctx.block)
        d_q, d_k, d_v = linear_attention_input_gradients(
            q, k, v, d_o, decay, states, initial, d_states, d_final, ctx.block
        )
        d_initial = initial_gradient(d_states, d_final, decay, q.shape[2]) if initial is not None else None
        return d_q, d_k, d_v, None, d_initial, None


def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None = None,
    *,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Returns o [B, Z, L, A] of a chunk and the state [B, Z, D, A] after it, from the state before it.

    Keeps q, k, v, the initial state and the states [B, Z, C+1, D, A]. The decay gets no gradient.
    """
    return _ChunkedLinearAttention.apply(q, k, v, decay, initial, block)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, *, block: int = BLOCK) -> Tensor:
    """Returns o [B, Z, L, A] of a whole sequence, whose state starts from zero."""
    return chunked_linear_attention(q, k, v, decay, block=block)[0]


def quadratic_linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Tensor:
    """o [B, Z, L, A] as ((q k^T) * mask) v, the left product, which needs L x L memory but no state."""
    return ((q @ k.mT) * decay_mask(decay, q.shape[2], q).to(q.dtype)) @ v
