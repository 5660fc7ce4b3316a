"""Softmax attention of queries to one block of keys, with the logarithm of its denominator, as operators.

    lse_i = log sum over j of exp(scale q_i . k_j)        o_i = sum over j of exp(scale q_i . k_j - lse_i) v_j

The o and lse of several blocks can be merged into the attention to all of their keys. torch's own
scaled_dot_product_attention does not return lse (FlashAttention, arXiv 2205.14135; blockwise: arXiv
2310.01889). Shapes: q [B, Z, M, A], k, v [B, G, L, A]; lse [B, Z, M] in float32 for half precisions.
``causal`` means that query i sees keys j <= i; M and L are then equal. G divides Z: Z/G consecutive heads of
q share one head of k and v and all contribute to its gradient; no kernel repeats keys or values in memory. o
and the gradients lie in memory as [B, M or L, Z, A], as torch's kernels write these.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.kept_results import kept
from spbench.impls.kernels.operator import Operator, differentiable


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """x [B, Z, M, A] -> [B, G, Z/G M, A]: queries that share a head of k follow each other."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool | Tensor) -> Tensor:
    """The scaled scores [B, G, Z/G M, L], -inf where a key is hidden; ``causal`` may also be a mask [M, L]
    that is True where a key is hidden."""
    precise = state_dtype(q.dtype)
    scores = (_by_key_head(q, k).to(precise) @ k.to(precise).mT).mul_(scale)
    if causal is not False:
        hidden = causal
        if not isinstance(hidden, Tensor):
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(2, (-1, q.shape[2])).masked_fill_(hidden, -torch.inf)
    return scores


def is_half(q: Tensor, *_: Any) -> bool:
    """Whether q has a half precision; FlashAttention's CUDA kernels take no other."""
    return q.dtype in (torch.float16, torch.bfloat16)


def new_like(x: Tensor, size: int) -> Tensor:
    """An empty tensor [B, Z, M, size] for x [B, Z, M, A], in memory [B, M, Z, size]."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, size).transpose(1, 2)


def forward_by_scores(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool | Tensor
) -> tuple[Tensor, Tensor]:
    """Returns o [B, Z, M, A] and lse [B, Z, M] from all scores, in memory at once in float32 or float64;
    ``causal`` is as in :func:`_scores`."""
    scores = _scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    by_key_head = scores.sub_(lse.unsqueeze(-1)).exp_() @ v.to(scores.dtype)
    o = new_like(q, v.shape[3])
    return o.copy_(by_key_head.reshape(o.shape)), lse.reshape(q.shape[:3])


#: keys that torch's CPU operators multiply with a tile of queries at a time, hidden keys included
_KEYS_AT_A_TIME = 512
#: the fewest positions of a causal block for which two calls are faster; each repacks keys of half precision
_LEAST_HALVED, _LEAST_HALVED_IN_HALF = 192, 384
ALL = slice(None)


def _cpu_flash_takes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> bool:
    """Whether torch's CPU operators can compute this block: q and v have one head size, and neither queries
    nor keys are empty (an empty block divides by zero there and kills the process)."""
    return q.shape[3] == v.shape[3] and q.numel() > 0 and k.numel() > 0


def _cpu_calls(q: Tensor, causal: bool) -> list[tuple[slice, slice, bool, Tensor | None]]:
    """The calls of torch's CPU operators that compute a block, each as (queries, keys, causal, mask to add to
    the scores or None). The last call has all keys.

    A causal block of up to 512 positions takes two calls, one for each half of the queries. The first call
    has half of the keys; in a single call every query would be multiplied with all keys.
    """
    length = q.shape[2]
    least = _LEAST_HALVED_IN_HALF if is_half(q) else _LEAST_HALVED
    if not causal or not least <= length <= _KEYS_AT_A_TIME:
        return [(ALL, ALL, causal, None)]
    half = length // 2
    hidden = q.new_full((length - half, length), -torch.inf).triu_(half + 1)
    return [(slice(half), slice(half), True, None), (slice(half, None), ALL, False, hidden)]


def _with_adjacent_features(*tensors: Tensor) -> list[Tensor]:
    """The tensors with stride 1 in the last dim, which torch's CPU operators assume and do not check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns the concatenation [B, Z, M, ...] of parts [B, Z, m, ...], in memory [B, M, Z, ...]."""
    rows = [x.transpose(1, 2) for x in parts]
    return (rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, 1)).transpose(1, 2)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = _with_adjacent_features(q, k, v)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    blocks = [
        operator(q[:, :, mine], k[:, :, theirs], v[:, :, theirs], 0.0, top, attn_mask=mask, scale=scale)
        for mine, theirs, top, mask in _cpu_calls(q, causal)
    ]
    return _joined([o for o, _ in blocks]), _joined([lse for _, lse in blocks]).contiguous()


#: the numbers of keys that a query sees before and after its own place, where the place of the last query is
#: the last key; -1: all keys
Window = tuple[int, int]


def _asked(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: Window
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What torch's flash attention takes behind its tensors, by place and by name: no packing, no dropout."""
    named = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
    return (None, None, q.shape[2], k.shape[2], 0.0, causal), named


def forward_by_kernel(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: Window = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """Returns o and lse in half precision on a GPU, where queries see the keys of a window (-1: all)."""
    features, width = v.shape[3], _width(q)
    inputs, (sizes, named) = (_by_position(x, width) for x in (q, k, v)), _asked(q, k, scale, causal, window)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(*inputs, *sizes, False, **named)
    return o[..., :features].transpose(1, 2), lse


def _width(q: Tensor) -> int:
    """The head size of q [B, Z, M, A] rounded up to a multiple of 8, as torch's CUDA kernels need it."""
    return -(-q.shape[3] // 8) * 8


def _by_position(x: Tensor, width: int) -> Tensor:
    """x [B, Z, M, A] as [B, M, Z, width], with zeros beyond A: torch has one head size for all arguments.

    The kernels lay results out as their arguments lie, so an argument that lies by head is copied.
    """
    missing = width - x.shape[3]
    by_position = (F.pad(x, (0, missing)) if missing else x).transpose(1, 2)
    is_by_head = by_position.stride(1) < by_position.stride(2)
    return by_position.contiguous() if is_by_head else by_position


def fake_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Empty tensors for o [B, Z, M, A] and lse [B, Z, M], as the kernel allocates these."""
    return new_like(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def backward_by_scores(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, in the shapes of these, from all scores in memory at once; o and
    lse may be results of attention to more keys than k has."""
    p = _scores(q, k, scale, causal)
    p.sub_(_by_key_head(lse.unsqueeze(-1), k)).exp_()
    d_out, queries, out = (_by_key_head(x, k).to(p.dtype) for x in (d_o, q, o))
    keys, values = k.to(p.dtype), v.to(p.dtype)
    d_v = p.mT @ d_out
    share = (d_out * out).sum(-1, keepdim=True)
    d_scores = (d_out @ values.mT).sub_(share).mul_(p).mul_(scale)
    gradients = d_scores @ keys, d_scores.mT @ queries, d_v
    d_q, d_k, d_v = (
        new_like(x, x.shape[3]).copy_(y.reshape(x.shape)) for x, y in zip((q, k, v), gradients, strict=True)
    )
    return d_q, d_k, d_v


def _backward_on_cpu(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_o, q, k, v, o = _with_adjacent_features(d_o, q, k, v, o)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    calls, gradients = _cpu_calls(q, causal), []
    for mine, theirs, top, mask in calls:
        of_queries, of_keys = [x[:, :, mine] for x in (d_o, q)], [x[:, :, theirs] for x in (k, v)]
        results = (o[:, :, mine], lse[:, :, mine])
        gradients.append(operator(*of_queries, *of_keys, *results, 0.0, top, attn_mask=mask, scale=scale))
    _, d_k, d_v = gradients[-1]
    for (_, theirs, *_), (_, d_keys, d_values) in zip(calls[:-1], gradients[:-1], strict=True):
        d_k[:, :, theirs].add_(d_keys)
        d_v[:, :, theirs].add_(d_values)
    return _joined([d_q for d_q, _, _ in gradients]), d_k, d_v


def backward_by_kernel(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: Window = (-1, -1),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in half precision on a GPU, where queries see the keys of a window."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's state; there is none
    width, (sizes, named) = _width(q), _asked(q, k, scale, causal, window)
    inputs = (_by_position(x, width) for x in (d_o, q, k, v, o))
    gradients = torch.ops.aten._flash_attention_backward(
        *inputs, lse.contiguous(), *sizes, unused, unused, **named
    )
    d_q, d_k, d_v = (y.transpose(1, 2)[..., : x.shape[3]] for x, y in zip((q, k, v), gradients, strict=True))
    return d_q, d_k, d_v


def fake_backward(d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of q, k and v, in the shapes of these."""
    d_q, d_k, d_v = (new_like(x, x.shape[3]) for x in (q, k, v))
    return d_q, d_k, d_v


def operator(schema: str, any_device: Callable[..., Any], fake: Callable[..., Any], **devices: Any) -> Any:
    """Define an operator with this schema, a fake, and by device (kernel, the arguments that it takes);
    returns the operator's overload."""
    name, arguments, results = schema.partition("(")
    made = Operator(name, any_device, arguments + results)
    for device, (kernel, takes) in devices.items():
        made.register_kernel(device, takes)(kernel)
    made.register_fake(fake)
    return made.overload


#: (q, k, v, scale, causal) -> (o [B, Z, M, A] of q's dtype, lse [B, Z, M])
flash_attention = operator(
    "flash_attention(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor, Tensor)",
    forward_by_scores,
    fake_forward,
    CPU=(_forward_on_cpu, _cpu_flash_takes),
    CUDA=(forward_by_kernel, is_half),
)
#: (d_o, q, k, v, o, lse, scale, causal) -> the parts of the gradients of q, k and v from this block of keys,
#: in the dtype of q, k and v; o and lse are results of the queries' attention to all keys, in all blocks
flash_attention_backward = operator(
    "flash_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, float scale,"
    " bool causal) -> (Tensor, Tensor, Tensor)",
    backward_by_scores,
    fake_backward,
    CPU=(_backward_on_cpu, lambda d_o, *others: _cpu_flash_takes(*others)),
    CUDA=(backward_by_kernel, lambda d_o, *others: is_half(*others)),
)


def _pairs(q: Sequence[int], k: Sequence[int], causal: bool) -> int:
    """The number of pairs of a query and a key that it sees, in all sequences and heads."""
    batch, heads, m, _ = q
    return batch * heads * (m * (m + 1) // 2 if causal else m * k[2])


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool) -> int:
    """FLOPs of softmax attention's forward pass for the shapes q [B, Z, M, A] and k, v [B, Z, L, A], without
    the pairs above the diagonal of a causal mask, which flash attention leaves out."""
    return 2 * _pairs(q, k, causal) * (q[3] + v[3])


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool) -> int:
    """FLOPs of softmax attention's backward pass, for the shapes and pairs of :func:`forward_flops`."""
    # the scores again, d_q and d_k; d_v and the gradient of the probabilities
    return 2 * _pairs(q, k, causal) * (3 * q[3] + 2 * v[3])


@register_flop_formula(torch.ops.spbench.flash_attention)
def _forward_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], scale: float, causal: bool, **_: Any
) -> int:
    return forward_flops(q, k, v, causal)


@register_flop_formula(torch.ops.spbench.flash_attention_backward)
def _backward_flops(
    d_o: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **_: Any
) -> int:
    return backward_flops(q, k, v, rest[-1])


_CAUSAL_FLASH_ATTENTION = differentiable(
    lambda q, k, v: kept(lambda: flash_attention(q, k, v, q.shape[-1] ** -0.5, True)),
    lambda d_o, q, *others: flash_attention_backward(d_o, q, *others, q.shape[-1] ** -0.5, True),
    lambda *arguments_and_results: arguments_and_results,
)


def causal_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns o [B, Z, M, A] of causal softmax attention to all keys, scores scaled by A**-0.5. In memory o
    lies as [B, M, Z, A], so that o as [B, M, H] is a view. The function keeps q, k, v, o and lse."""
    result: Tensor = _CAUSAL_FLASH_ATTENTION(q, k, v)
    return result
