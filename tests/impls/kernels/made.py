"""Inputs and comparisons of the tests of kernels. Arguments of the operators of gated recurrences, and of
what stands around these."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.decay import state_dtype


def made(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def bits(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


def assert_same(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """The same values and the same gradients of all inputs, to float64's rounding."""
    y, expected = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    weight = made(*y.shape, seed=9).detach()
    ours_of, plain_of = (torch.autograd.grad((x * weight).sum(), inputs) for x in (y, expected))
    torch.testing.assert_close(ours_of, plain_of, rtol=1e-10, atol=1e-13)


def bytes_kept(function: Callable[[], Any]) -> int:
    """Bytes of the distinct tensors that a forward saves for backward."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = function()
    del result
    return sum(kept.values())


OPS = torch.ops.spbench
#: batch, positions, heads of queries and keys, of values, their sizes
B, L, G, Z, D, A = 2, 5, 1, 2, 4, 3
#: where documents begin
STARTS = [0, 2]


def recurrence_arguments(tensor: Callable[..., Tensor]) -> dict[str, tuple[Any, ...]]:
    """By the operators' names; ``tensor`` makes one of a shape in the dtype that is tested."""
    x, z, row = tensor(B, L, 8), tensor(B, L, 8, seed=1), tensor(8, 4, seed=2)
    state = state_dtype(x.dtype)
    statistics = tensor(B, L, 1, seed=3).to(state).abs()
    return {
        "short_convolution": (x, row, row[:, 0].clone(), tensor(B, 3, 8), [-1, 2]),
        "short_convolution without more": (x, row, None, None, []),
        "short_convolution_backward": (z, x, row, row[:, 0].clone(), tensor(B, 3, 8), [-1, 2]),
        "short_convolution_backward without more": (z, x, row, None, None, []),
        "gated_norm": (x, z, row[:, 0].clone(), 1e-3, True, True),
        "gated_norm_backward": (z, x, z, row[:, 0].clone(), statistics, False, False),
        "feature_gate": (tensor(B, L, Z, D), row[:Z, 0].clone(), tensor(Z, D)),
        "feature_gate_backward": (
            tensor(B, L, Z, D).to(state),
            tensor(B, L, Z, D, seed=1),
            row[:Z, 0].clone(),
            tensor(Z, D),
        ),
        "l2_norm": (x,),
        "l2_norm_backward": (z, x, statistics),
        **_kernels(tensor, state),
    }


def _kernels(tensor: Callable[..., Tensor], state: torch.dtype) -> dict[str, tuple[Any, ...]]:
    q, k, v, d_o = (
        tensor(B, L, G, D),
        tensor(B, L, G, D, seed=1),
        tensor(B, L, Z, A, seed=2),
        tensor(B, L, Z, A),
    )
    g, b = -tensor(B, L, Z, seed=3).to(state).abs(), tensor(B, L, Z, seed=4).to(state).sigmoid()
    sums, first = OPS.recurrence_sums(g, L, False, STARTS), tensor(B, Z, D, A, seed=5).to(state)
    states, scores = OPS.state_space_block_states(k, v, sums, b, STARTS), OPS.state_space_scores(q, k)
    passed = OPS.state_space_passed(states, sums, None, v, False, STARTS)
    g_of_features = -tensor(B, L, Z, D, seed=3).to(state).abs()
    of_features = OPS.recurrence_sums(g_of_features, L, False, STARTS)
    carry = tensor(B, Z, D * (A + D)).to(state)
    return {
        "recurrence_sums": (g, 2, True, STARTS),
        "recurrence_sums of features": (g_of_features, 2, True, STARTS),
        "recurrence_merged": (torch.stack((carry, carry)), [D, A], [1, 0], False, None),
        "recurrence_merged by a number": (tensor(2, B, Z, D * A + 1).to(state), [D, A], [1], True, first),
        "state_space_scores": (q, k),
        "state_space_block_states": (k, v, sums, b, STARTS),
        "state_space_carry": (states, sums, True, STARTS),
        "state_space_passed": (states, sums, first, v, False, STARTS),
        "state_space_output": (scores, q, v, sums, b, passed, STARTS),
        "state_space_output_state_gradients": (q, d_o, sums, STARTS),
        "state_space_score_gradients": (v, d_o, sums, b, G, 2, STARTS),
        "state_space_key_gradients": (k, v, sums, b, passed, 2, STARTS),
        "state_space_query_gradients": (q, sums, d_o, passed, 2, STARTS),
        "state_space_input_gradients": _input_gradients(q, k, v, sums, b, d_o, scores, passed),
        **_of_gated_delta(q, k, v, d_o, sums, b, first),
        **{
            f"{name} of features": x
            for name, x in _of_gated_delta(q, k, v, d_o, of_features, b, first).items()
        },
    }


def _of_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, sums: Tensor, b: Tensor, first: Tensor
) -> dict[str, tuple[Any, ...]]:
    inverse = OPS.gated_delta_inverse(k, sums, b, STARTS)
    w, u = OPS.gated_delta_wy(k, v, sums, b, inverse, STARTS)
    before, written = OPS.gated_delta_states(k, w, u, sums, None, STARTS)
    return {
        "gated_delta_inverse": (k, sums, b, STARTS),
        "gated_delta_wy": (k, v, sums, b, inverse, STARTS),
        "gated_delta_states": (k, w, u, sums, first, STARTS),
        "gated_delta_carry": (k, w, u, sums, STARTS),
        "gated_delta_output": (q, k, written, sums, before, STARTS),
        "gated_delta_own_gradients": (q, k, d_o, sums, STARTS),
        "gated_delta_state_gradients": (q, k, w, sums, d_o, written, first, STARTS),
        "gated_delta_gradient_carry": (q, k, w, sums, d_o, written, STARTS),
        "gated_delta_read_gradients": (q, k, written, sums, before, d_o, written, before, STARTS),
        "gated_delta_wy_gradients": (k, v, sums, b, inverse, w, u, STARTS),
    }


def _input_gradients(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor, b: Tensor, d_o: Tensor, scores: Tensor, passed: Tensor
) -> tuple[Any, ...]:
    of_keys, of_writing = OPS.state_space_key_gradients(k, v, sums, b, passed, 1, STARTS)
    of_queries, of_reading = OPS.state_space_query_gradients(q, sums, d_o, passed, 1, STARTS)
    of_states = [of_queries.sum(1), of_reading, of_keys.sum(1), of_writing]
    return q, k, v, sums, b, d_o, scores, scores, passed, passed, of_states, STARTS
