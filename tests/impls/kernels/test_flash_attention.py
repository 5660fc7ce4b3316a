"""The block attention operators: values, gradients, fakes and FLOPs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.strategies.ring_attention import merge

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")),
]
#: of what the kernels of half precision may be off by, beside float64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(dtype: torch.dtype, device: str, m: int = 32, length: int = 32) -> list[Tensor]:
    """q, d_o, k, v."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 2, n, 16, generator=generator, dtype=torch.float64).to(device, dtype)
        for n in (m, m, length, length)
    ]


def error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("causal", "m"), [(True, 32), (False, 32), (False, 16)])
def test_values_and_gradients_are_torchs(dtype: torch.dtype, causal: bool, m: int, device: str) -> None:
    q, d_o, k, v = inputs(dtype, device, m)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    reference = F.scaled_dot_product_attention(*exact, is_causal=causal)
    reference.backward(d_o.double())
    scores = (exact[0] @ exact[1].mT).detach() / 4
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    o, lse = flash_attention(q, k, v, 0.25, causal)
    assert error(o, reference.detach()) < TOLERANCE[dtype]
    assert error(lse, scores.logsumexp(-1)) < TOLERANCE[dtype]
    for x, of in zip(flash_attention_backward(d_o, q, k, v, o, lse, 0.25, causal), exact, strict=True):
        assert of.grad is not None
        assert error(x, of.grad) < TOLERANCE[dtype]


def test_blocks_merge_to_the_whole() -> None:
    q, _, k, v = inputs(torch.float64, "cpu")
    o = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    # scores from 4 e5 to 4 e-5: a merge that does not rescale, or that overflows, is far off
    k = k * torch.logspace(5, -5, 32, dtype=torch.float64).unsqueeze(-1)
    for block in (slice(10, 30), slice(30, 32), slice(10)):
        merge(o, lse, *flash_attention(q, k[:, :, block], v[:, :, block], 0.25, False))
    reference = F.scaled_dot_product_attention(q, k, v)
    assert error(o, reference) < 1e-9


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [32, 16])
def test_fakes_are_like_the_real_ones(dtype: torch.dtype, m: int) -> None:
    q, d_o, k, v = inputs(dtype, "cpu", m)
    forward = flash_attention(q, k, v, 0.25, False)
    real = [*forward, *flash_attention_backward(d_o, q, k, v, *forward, 0.25, False)]
    with FakeTensorMode() as mode:
        q, d_o, k, v = (mode.from_tensor(x) for x in (q, d_o, k, v))
        forward = flash_attention(q, k, v, 0.25, False)
        fake = [*forward, *flash_attention_backward(d_o, q, k, v, *forward, 0.25, False)]
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


@pytest.mark.parametrize(("causal", "pairs"), [(True, 32 * 33 // 2), (False, 32 * 32)])
def test_flops(causal: bool, pairs: int) -> None:
    q, d_o, k, v = inputs(torch.float32, "cpu")
    with FlopCounterMode(display=False) as forward:
        o, lse = flash_attention(q, k, v, 0.25, causal)
    with FlopCounterMode(display=False) as backward:
        flash_attention_backward(d_o, q, k, v, o, lse, 0.25, causal)
    assert forward.get_total_flops() == 3 * 2 * pairs * 16 * 2 * 2
    assert backward.get_total_flops() == 3 * 2 * pairs * 16 * 2 * 5
