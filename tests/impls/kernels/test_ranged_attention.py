"""Attention to ranges of keys: values and gradients, and bands as FlashAttention's kernel has them."""

from __future__ import annotations

import pytest
import torch

from spbench.impls.attended import Range, Ranges
from spbench.impls.kernels.ranged_attention import (
    _hidden,
    ranged_attention,
    ranged_attention_backward,
    window_of,
)
from tests.impls.kernels.test_flash_attention import DEVICES, TOLERANCE, error, inputs

#: queries, keys, low, high
BANDS = [
    (n, m, low, high) for n, m in ((5, 5), (3, 7), (7, 3)) for low in (-9, -2, 0, 3) for high in (-1, 0, 2, 9)
]


def test_a_window_of_the_kernel_hides_what_the_band_does() -> None:
    found = 0
    for n, m, low, high in BANDS:
        if (window := window_of(Range(0, n, 0, m, low, high))) is None:
            continue
        left, right = (m if side == -1 else side for side in window)
        query, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
        hidden = (key < query - left) | (key > query + right)
        assert torch.equal(hidden, _hidden(Range(0, n, 0, m, low, high), torch.device("cpu")))
        assert not hidden.all(1).any()  # the kernel gives no logarithm of nothing
        found += 1
    assert 5 < found < len(BANDS)


#: of all queries and keys, and of parts: a window, one of more keys than queries, two documents
SEEN = {
    "window": [Range(0, 96, 0, 96, -17, 0)],
    "more keys": [Range(0, 64, 0, 96, 10, 32)],
    "documents": [Range(0, 40, 0, 40, -7, 0), Range(40, 56, 40, 56, -100, 0)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SEEN)
def test_ranges_are_attended_to_alone(name: str, dtype: torch.dtype, device: str) -> None:
    ranges = SEEN[name]
    m, length = (max(x.first_query + x.queries for x in ranges), max(x.first_key + x.keys for x in ranges))
    q, d_o, k, v = inputs(dtype, device, m, length)
    exact = [x.cpu().double().clone().requires_grad_() for x in (q, k, v)]
    hidden = torch.ones(m, length, dtype=torch.bool)
    for x in ranges:
        part = slice(x.first_query, x.first_query + x.queries), slice(x.first_key, x.first_key + x.keys)
        hidden[part] = _hidden(x, torch.device("cpu"))
    weights = (exact[0] @ exact[1].mT / 4).masked_fill(hidden, -torch.inf).softmax(-1)
    (weights @ exact[2]).backward(d_o.double().cpu())

    text = Ranges.of(ranges).text
    o, lse = ranged_attention(q, k, v, 0.25, text)
    gradients = ranged_attention_backward(d_o, q, k, v, o, lse, 0.25, text)
    assert error(o.cpu(), weights @ exact[2]) < TOLERANCE[dtype]
    for x, gradient in zip(exact, gradients, strict=True):
        assert x.grad is not None
        assert error(gradient.cpu(), x.grad) < TOLERANCE[dtype]
