"""The block attention operators: values, gradients, fakes and FLOPs. Attention to ranges of keys: values and
gradients, and bands as FlashAttention's kernel has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from spbench.impls.attended import Range, Ranges
from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.kernels.ranged_attention import (
    _hidden,
    ranged_attention,
    ranged_attention_backward,
    window_of,
)
from spbench.impls.strategies.blockwise import merge

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


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("m", "length", "causal"),
    # one call and two, even and odd, on both sides of where torch's operator changes its way
    [*((m, m, True) for m in (191, 192, 511, 512, 513)), (300, 600, False)],
)
def test_torchs_cpu_operators_compute_a_part_of_the_whole(
    dtype: torch.dtype, m: int, length: int, causal: bool
) -> None:
    """Backward gets o and lse of the attention to another block too; inputs are views of wider tensors."""
    q, d_o, k, v = (x[:, :, 1:] for x in inputs(dtype, "cpu", m + 1, length + 1))
    *_, more_k, more_v = inputs(dtype, "cpu", m, 40)
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 4
    if causal:
        scores = scores.masked_fill(torch.ones(m, length, dtype=torch.bool).triu(1), -torch.inf)
    other = exact[0].detach() @ more_k.double().mT / 4
    whole = torch.cat((scores, other), -1)
    o = whole.softmax(-1) @ torch.cat((exact[2], more_v.double()), 2)
    o.backward(d_o.double())

    parts = flash_attention(q, k, v, 0.25, causal), flash_attention(q, more_k, more_v, 0.25, False)
    (merged, lse), (block_o, block_lse) = parts
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert error(lse, scores.detach().logsumexp(-1)) < (1e-12 if dtype is torch.float64 else 1e-5)
    merged = merged.to(lse.dtype)
    merge(merged, lse, block_o, block_lse)
    assert error(merged, o.detach()) < TOLERANCE[dtype]
    gradients = flash_attention_backward(d_o, q, k, v, merged.to(dtype), lse, 0.25, causal)
    for x, of in zip(gradients, exact, strict=True):
        assert error(x, of.grad) < TOLERANCE[dtype]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
# one call of torch's CPU operators, two, fewer queries, and scores one by one for values of another size
@pytest.mark.parametrize(
    ("m", "length", "causal", "values"),
    [(32, 32, False, 16), (16, 32, False, 16), (32, 32, True, 16), (400, 400, True, 16), (32, 32, True, 8)],
)
def test_values_and_gradients_are_torchs(
    dtype: torch.dtype, kv_heads: int, m: int, length: int, causal: bool, values: int, device: str
) -> None:
    """Keys that queries share count as repeated: the gradient of each is the sum of those of its copies."""
    generator = torch.Generator().manual_seed(0)
    q, d_o, k, v = (
        torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in ((4, m, 16), (4, m, values), (kv_heads, length, 16), (kv_heads, length, values))
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    keys, of_values = (x.repeat_interleave(4 // kv_heads, 1) for x in exact[1:])
    reference = F.scaled_dot_product_attention(exact[0], keys, of_values, is_causal=causal)
    reference.backward(d_o.double())
    scores = (exact[0] @ keys.mT).detach() / 4
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    o, lse = flash_attention(q, k, v, 0.25, causal)
    assert error(o, reference.detach()) < TOLERANCE[dtype]
    assert error(lse, scores.logsumexp(-1)) < TOLERANCE[dtype]
    gradients = flash_attention_backward(d_o, q, k, v, o, lse, 0.25, causal)
    for x, of in zip(gradients, exact, strict=True):
        assert error(x, of.grad) < TOLERANCE[dtype]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, d_o)]
        fake = flash_attention(*fakes[:3], 0.25, causal)
        fake += flash_attention_backward(fakes[3], *fakes[:3], *fake, 0.25, causal)
    real = (o, lse, *gradients)
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def test_scores_are_not_materialised() -> None:
    """They would take 8 MiB a head for 2,048 positions, 48 MiB."""
    q, d_o, k, v = inputs(torch.float32, "cpu", 2048, 2048)
    with torch.profiler.profile(profile_memory=True) as profile:
        o, lse = flash_attention(q, k, v, 0.25, True)
        flash_attention_backward(d_o, q, k, v, o, lse, 0.25, True)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 2**24


def test_features_that_are_not_adjacent() -> None:
    """Torch's CPU operators read past them."""
    q, d_o, k, v = inputs(torch.float64, "cpu")
    strided = [x.mT.contiguous().mT for x in (q, d_o, k, v)]
    expanded = torch.ones((), dtype=torch.float64).expand(d_o.shape)
    for (a, d_a, b, c), (x, d_x, y, z) in (
        (strided, (q, d_o, k, v)),
        ((q, expanded, k, v), (q, expanded.contiguous(), k, v)),
    ):
        got, want = flash_attention(a, b, c, 0.25, True), flash_attention(x, y, z, 0.25, True)
        got += flash_attention_backward(d_a, a, b, c, *got, 0.25, True)
        want += flash_attention_backward(d_x, x, y, z, *want, 0.25, True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("m", "length"), [(0, 4), (4, 0), (0, 0)])
def test_empty_blocks(m: int, length: int) -> None:
    """Torch's CPU operators divide by zero there, and the process dies."""
    q, d_o, k, v = inputs(torch.float32, "cpu", m, length)
    o, lse = flash_attention(q, k, v, 0.25, False)
    assert not o.any()
    assert (lse == -torch.inf).all()
    gradients = flash_attention_backward(d_o, q, k, v, o, lse, 0.25, False)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert not any(x.any() for x in gradients)


def test_a_block_without_keys_merges_to_what_was_there() -> None:
    q, _, k, v = inputs(torch.float64, "cpu")
    o, lse = flash_attention(q, k, v, 0.25, False)
    before = o.clone(), lse.clone()
    merge(o, lse, *flash_attention(q, k[:, :, :0], v[:, :, :0], 0.25, False))
    torch.testing.assert_close((o, lse), before)


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


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("causal", "pairs"), [(True, 32 * 33 // 2), (False, 32 * 32)])
def test_flops(causal: bool, pairs: int, kv_heads: int) -> None:
    """Those of the heads of queries, however many share a key."""
    q, d_o, k, v = inputs(torch.float32, "cpu")
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    with FlopCounterMode(display=False) as forward:
        o, lse = flash_attention(q, k, v, 0.25, causal)
    with FlopCounterMode(display=False) as backward:
        flash_attention_backward(d_o, q, k, v, o, lse, 0.25, causal)
    assert forward.get_total_flops() == 3 * 2 * pairs * 16 * 2 * 2
    assert backward.get_total_flops() == 3 * 2 * pairs * 16 * 2 * 5


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
        assert error(gradient.cpu(), x.grad) < TOLERANCE[dtype]
