"""Every kernel against torch's own operators, and every fake implementation against its real one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from spbench.impls.kernels import dropout_attention, projection, rotary, swiglu  # noqa: F401  # operators
from spbench.impls.kernels.bias_gelu import bias_gelu
from spbench.impls.kernels.cross_entropy import vocab_parallel_cross_entropy
from spbench.impls.kernels.dropout import bias_dropout_add, masked_dropout
from spbench.impls.kernels.flash_attention import flash_attention
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.kernels.linear_attention import linear_attention_state_gradients, linear_attention_states
from spbench.impls.kernels.rms_norm import plain_rms_norm, rms_norm
from spbench.impls.kernels.softmax import MASKED_SCORE, masked_softmax, megatron_fuses
from tests.impls.kernels.made import assert_same, bits, bytes_kept, made

HALF = [torch.float16, torch.bfloat16]
OPS = torch.ops.spbench


# -- softmax -------------------------------------------------------------------------------------------

MASKS = {
    "none": None,
    "keys": torch.arange(20)[None, None, None, :] >= 17,
    # every query has a key: what happens to those without is in a test of its own
    "square": bits(2, 1, 8, 20) & (torch.arange(20) > 0),
}


@pytest.mark.parametrize("way", ["fused", "plain", "megatron"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [8, 7])  # Megatron-LM's kernel takes multiples of 4
def test_masked_softmax(way: str, mask: str, queries: int) -> None:
    hidden = MASKS[mask]
    if hidden is not None:
        hidden = hidden[:, :, :queries]

    def plain(scores: Tensor) -> Tensor:
        scaled = scores * 0.3
        return F.softmax(scaled if hidden is None else scaled.masked_fill(hidden, MASKED_SCORE), -1)

    def ours(scores: Tensor) -> Tensor:
        # times 1: the gradient that arrives in the softmax must be its own, for it is overwritten
        return masked_softmax(scores, hidden, 0.3, way) * 1.0

    scores = made(2, 2, queries, 20)
    before = scores.detach().clone()
    assert_same(ours, plain, scores)
    assert torch.equal(scores, before)
    assert gradcheck(ours, (scores,), fast_mode=True)


@pytest.mark.parametrize("way", ["fused", "plain", "megatron"])
@pytest.mark.parametrize("dtype", HALF)
def test_softmax_of_half_precision_is_rounded_once(way: str, dtype: torch.dtype) -> None:
    scores = made(2, 2, 8, 20, dtype=dtype).detach()
    # a power of two scales exactly
    expected = F.softmax(scores.float() * 0.25, -1).to(dtype)
    torch.testing.assert_close(masked_softmax(scores, None, 0.25, way), expected, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["fused", "plain", "megatron"])
def test_query_without_a_key_attends_to_all_alike(way: str) -> None:
    none = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    probabilities = masked_softmax(made(1, 1, 2, 4), none, 1.0, way)
    torch.testing.assert_close(probabilities, torch.full_like(probabilities, 0.25))


def test_what_megatron_fuses() -> None:
    assert all(megatron_fuses(4, 8, keys) for keys in (17, 2048))
    assert not any(megatron_fuses(*sizes) for sizes in ((4, 8, 16), (4, 8, 2049), (4, 6, 64), (6, 8, 64)))


# -- bias, gelu, dropout -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_bias_gelu(fused: bool) -> None:
    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(x, bias, fused=fused)

    x, bias = made(2, 3, 5), made(5, seed=2)
    assert_same(ours, lambda x, bias: F.gelu(x + bias, approximate="tanh"), x, bias)
    assert gradcheck(ours, (x, bias))


def test_masked_dropout() -> None:
    kept = bits(2, 3, 5)
    assert_same(lambda x: masked_dropout(x, kept, 0.2), lambda x: x * kept / 0.8, made(2, 3, 5))


@pytest.mark.parametrize("keep_input", [False, True])
def test_bias_dropout_add(keep_input: bool) -> None:
    kept = bits(2, 3, 5)

    def ours(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_add(x, bias, residual, kept, 0.2, keep_input=keep_input)

    inputs = made(2, 3, 5), made(5, seed=2), made(2, 3, 5, seed=3)
    assert_same(ours, lambda x, bias, residual: residual + (x + bias) * kept / 0.8, *inputs)
    assert gradcheck(ours, inputs)


# -- layer norm ----------------------------------------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    module = LayerNorm(x.shape[-1], eps)
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


def test_layer_norm() -> None:
    inputs = made(2, 3, 8), made(8, seed=2), made(8, seed=3)
    assert_same(layer_norm, lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5), *inputs)
    assert gradcheck(layer_norm, inputs)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_layer_norm_in_lower_precision_is_torchs(dtype: torch.dtype) -> None:
    inputs = [made(2, 3, 8, seed=1, dtype=dtype), made(8, seed=2, dtype=dtype), made(8, seed=3, dtype=dtype)]
    y, expected = layer_norm(*inputs), F.layer_norm(inputs[0], (8,), *inputs[1:], 1e-5)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    weight = made(2, 3, 8, seed=9, dtype=dtype).detach()
    ours, torchs = (torch.autograd.grad((x * weight).sum(), inputs) for x in (y, expected))
    # torch's statistics are not rounded on the way to its backward either: allow one rounding
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, torchs, rtol=eps, atol=eps)


# -- root-mean-square norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(weighted: bool) -> None:
    inputs = [made(2, 3, 8), made(8, seed=2)][: 1 + weighted]
    assert_same(rms_norm, lambda x, w=None: F.rms_norm(x, (8,), w, 1e-6), *inputs)
    assert_same(plain_rms_norm, lambda x, w=None: F.rms_norm(x, (8,), w, 1e-6), *inputs)
    assert gradcheck(rms_norm, inputs)


def test_rms_norm_of_a_view() -> None:
    """As of the heads of an attention's output: what is normalised is not contiguous, the result is."""
    x = made(2, 4, 3, 8)
    assert_same(lambda x: rms_norm(x.transpose(1, 2)), lambda x: plain_rms_norm(x.transpose(1, 2)), x)
    assert rms_norm(x.transpose(1, 2)).is_contiguous()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_rms_norm_in_lower_precision_rounds_once(dtype: torch.dtype, weighted: bool) -> None:
    inputs = [made(2, 3, 8, seed=1, dtype=dtype), made(8, seed=2, dtype=dtype)][: 1 + weighted]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y, expected = rms_norm(*inputs), plain_rms_norm(*exact)
    weight = made(2, 3, 8, seed=9, dtype=dtype).detach()
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y, expected.to(dtype), **close)
    ours = torch.autograd.grad((y * weight).sum(), inputs)
    right = torch.autograd.grad((expected * weight.double()).sum(), exact)
    torch.testing.assert_close(ours, tuple(x.to(dtype) for x in right), **close)


# -- cross entropy -------------------------------------------------------------------------------------


def test_cross_entropy() -> None:
    labels = torch.tensor([[0, 6, 3], [2, 2, 5]])

    def plain(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    logits = made(2, 3, 7)
    before = logits.detach().clone()
    assert_same(lambda x: vocab_parallel_cross_entropy(x, labels, None), plain, logits)
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_cross_entropy_of_large_logits_is_finite() -> None:
    logits = (made(1, 2, 7).detach() * 1e4).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[1, 2]]), None)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
def test_cross_entropy_of_half_precision_is_float32(dtype: torch.dtype) -> None:
    logits, labels = made(2, 3, 7, dtype=dtype), torch.tensor([[0, 6, 3], [2, 2, 5]])
    loss = vocab_parallel_cross_entropy(logits, labels, None)
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.flatten(), expected)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.dtype is dtype


# -- what is kept for backward -------------------------------------------------------------------------


def test_bytes_kept_for_backward() -> None:
    scores, x = made(1, 4, 8, 32, dtype=torch.bfloat16), made(4, 8, dtype=torch.bfloat16)
    n, bias, kept = scores.numel(), made(8, dtype=torch.bfloat16, seed=2), bits(4, 8)
    assert bytes_kept(lambda: masked_softmax(scores, None, 0.5, "fused")) == 2 * n
    assert bytes_kept(lambda: masked_softmax(scores, None, 0.5, "megatron")) == 2 * n
    assert bytes_kept(lambda: masked_softmax(scores, None, 0.5, "plain")) == 4 * n
    odd = made(1, 4, 7, 32, dtype=torch.bfloat16)
    assert bytes_kept(lambda: masked_softmax(odd, None, 0.5, "megatron")) == 8 * odd.numel()
    assert bytes_kept(lambda: masked_dropout(x, kept, 0.5)) == 32
    assert bytes_kept(lambda: bias_dropout_add(x, bias, x, kept, 0.5)) == 32
    assert bytes_kept(lambda: bias_dropout_add(x, bias, x, kept, 0.5, keep_input=True)) == 32 + 64
    assert bytes_kept(lambda: bias_gelu(x, bias, fused=True)) == 64 + 16
    # the input, two float32 statistics a row (of the root-mean-square one), weight and bias
    assert bytes_kept(lambda: layer_norm(x, bias, bias)) == 64 + 2 * 4 * 4 + 16
    assert bytes_kept(lambda: rms_norm(x)) == 64 + 4 * 4
    assert bytes_kept(lambda: rms_norm(x, bias)) == 64 + 4 * 4 + 16


# -- fakes ---------------------------------------------------------------------------------------------


def _arguments(dtype: torch.dtype, transposed: bool) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator by its name; ``transposed`` makes the inputs non-contiguous."""

    def tensor(*shape: int, seed: int = 0) -> Tensor:
        x = made(*shape, dtype=dtype, seed=seed).detach()
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if transposed else x

    x, y, row = tensor(2, 3, 8), tensor(2, 3, 8, seed=1), made(8, dtype=dtype, seed=2).detach()
    kept, scores = bits(2, 3, 8), tensor(2, 2, 4, 8)
    v, rates = tensor(2, 2, 4, 5, seed=3), torch.tensor([0.0, 0.5])
    states = linear_attention_states(scores, v, rates, 3)
    before = linear_attention_states(scores, v, None, 4)[:, :, 1]
    d_states = linear_attention_state_gradients(scores, v, rates, 3)
    statistics = made(2, 3, 1, dtype=torch.float32 if dtype in HALF else dtype).detach().abs()
    q, k = tensor(2, 2, 4, 8, seed=4), tensor(2, 2, 4, 8, seed=5)
    o, lse = flash_attention(q, k, v, 0.5, True)
    return {
        "flash_attention": (q, k, v, 0.5, True),
        "flash_attention_backward": (o, q, k, v, o, lse, 0.5, True),
        "masked_scale": (x, kept, 1.25),
        "bias_dropout_add": (x, row, y, kept, 1.25),
        "bias_gelu": (x, row),
        "bias_gelu_backward": (y, x, row),
        "layer_norm": (x, row, row, 1e-5),
        "layer_norm_backward": (y, x, statistics, statistics, row, row),
        "linear_attention_states": (scores, v, rates, 3),
        "linear_attention_output": (scores, scores, v, rates, states, before, 3),
        "linear_attention_state_gradients": (scores, v, None, 3),
        "linear_attention_input_gradients": (scores, scores, v, v, rates, states, None, d_states, before, 3),
        "rms_norm": (x, row, 1e-6),
        "rms_norm_backward": (y, x, statistics, row),
        "rms_norm without a weight": (x, None, 1e-6),
        "rms_norm_backward without a weight": (y, x, statistics, None),
        "masked_softmax": (scores, bits(2, 1, 1, 8), 0.5, False),
        "masked_softmax_backward_": (scores.clone(), scores, 0.5),
        **_library_arguments(x, y, q, k, lse),
    }


def _library_arguments(x: Tensor, y: Tensor, q: Tensor, k: Tensor, lse: Tensor) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operators of fused libraries; x, y [2, 3, 8], q, k [2, 2, 4, 8], lse [2, 2, 4]."""
    sums = torch.promote_types(x.dtype, torch.float32)
    main, matrix, labels = torch.zeros(8, 8, dtype=sums), x[0].mT @ y[0], torch.tensor([[0, 3, 7], [9, 8, 1]])
    pairs = y.unflatten(-1, (2, 4)).clone()
    statistics = OPS.cross_entropy_statistics(x, labels, 0).unsqueeze(0)
    return {
        "te_mm": (x, matrix),
        "te_accumulate_mm_": (main, x[0].mT, y[0]),
        "accumulate_mm_": (main.clone(), x[0].mT, y[0]),
        "strided_bmm": (q, k.mT, 0.5),
        "swiglu": (pairs, None),
        "swiglu_backward": (x[..., :4], pairs, None),
        "swiglu with a bias": (pairs, pairs[0, 0]),
        "swiglu_backward with a bias": (x[..., :4], pairs, pairs[0, 0]),
        "squared_relu": (x,),
        "squared_relu_backward": (y, x),
        "rotary": (q, torch.ones(4, 8, dtype=sums), True),
        "cross_entropy_statistics": (x, labels, 0),
        "cross_entropy_gradient_": (x.clone(), statistics, labels, 0),
        "dropout_flash_attention": (q, k, k, 0.5, 3),
        "dropout_flash_attention_backward": (q, q, k, k, q, lse, 0.5, 3),
    }


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("name", _arguments(torch.float32, False))
def test_fake_is_like_the_real_operator(name: str, dtype: torch.dtype, transposed: bool) -> None:
    """The declared mutation, and that shapes, dtypes, strides and devices agree."""
    operator, tests = getattr(OPS, name.split()[0]).default, ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, _arguments(dtype, transposed)[name], test_utils=tests)


def test_every_operator_is_checked() -> None:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("spbench::"))
    registered = {name.split("::")[1].split(".")[0] for name in names}
    assert registered == {name.split()[0] for name in _arguments(torch.float32, False)}
