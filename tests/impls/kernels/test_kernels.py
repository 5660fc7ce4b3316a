"""Kernels against torch's own operators, and what they keep for backward. Head and loss in tiles of the
vocabulary, and an update of all weights at once, beside torch's own.
Shared experts beside the dispatch: which operators their stream has, what waits for what, and that their
time hides behind what is sent. Kernels of fused libraries against torch's own operators, and what they keep.
"""

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.profiler import profile

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, HOST_WORK, Kind, Program
from spbench.impls.backends.optimizer import PRECISIONS, Optimizer
from spbench.impls.collectives import ReusedBuffer
from spbench.impls.kernels import activations, projection
from spbench.impls.kernels.cross_entropy import (
    compiled_cross_entropy,
    cross_entropy_in_one_region,
    cross_entropy_in_place,
    vocab_parallel_cross_entropy,
)
from spbench.impls.kernels.dropout import bias_dropout_add, masked_dropout
from spbench.impls.kernels.dropout_attention import dropout_flash_attention
from spbench.impls.kernels.flash_attention import causal_flash_attention
from spbench.impls.kernels.host_copies import samples_begun
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.kernels.rms_norm import plain_rms_norm, rms_norm
from spbench.impls.kernels.rotary import fused_rotary, rotated, rotated_by_angles
from spbench.impls.kernels.side_stream import SideStream
from spbench.impls.kernels.softmax import MASKED_SCORE, masked_softmax, megatron_fuses, softmax_of_scores
from spbench.impls.kernels.vocabulary_tiles import token_losses
from spbench.impls.layout import Unsupported
from spbench.impls.models.blocks.feed_forward import ACTIVATIONS, FACTORS
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from tests.cells import make_cell
from tests.impls.kernels.made import assert_same, bits, bytes_kept, made

HALF = [torch.float16, torch.bfloat16]


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
        return activations.bias_gelu(x, bias, fused=fused)

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


def test_rms_norm_of_a_copy_in_float32_keeps_its_input_alone() -> None:
    upcast = partial(rms_norm, way="upcast")
    inputs = [made(2, 3, 8), made(8, seed=2)]
    assert_same(upcast, plain_rms_norm, *inputs)
    assert gradcheck(upcast, inputs)
    x, weight = (each.detach().bfloat16().requires_grad_() for each in inputs)
    y = upcast(x, weight)
    torch.testing.assert_close(y, rms_norm(x.float(), weight.float()).bfloat16(), rtol=0, atol=0)
    assert bytes_kept(lambda: upcast(x, weight)) == 2 * (x.numel() + weight.numel())
    assert {each.dtype for each in torch.autograd.grad(y.sum(), [x, weight])} == {torch.bfloat16}


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
    assert bytes_kept(lambda: activations.bias_gelu(x, bias, fused=True)) == 64 + 16
    # the input, two float32 statistics a row (of the root-mean-square one), weight and bias
    assert bytes_kept(lambda: layer_norm(x, bias, bias)) == 64 + 2 * 4 * 4 + 16
    assert bytes_kept(lambda: rms_norm(x)) == 64 + 4 * 4
    assert bytes_kept(lambda: rms_norm(x, bias)) == 64 + 4 * 4 + 16


@pytest.mark.parametrize("rows", [1, 7, 20, 64])
def test_tiles_make_the_loss_and_its_gradients(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 20))
    labels, d_loss = torch.randint(20, (2, 3)), torch.randn(2, 3, dtype=torch.float64)
    loss = token_losses(x.view(2, 3, 8), weight, labels, rows)
    expected = F.cross_entropy(x @ weight.T, labels.flatten(), reduction="none").view(2, 3)
    for got, right in zip(
        (loss, *torch.autograd.grad(loss, [x, weight], d_loss)),
        (expected, *torch.autograd.grad(expected, [x, weight], d_loss)),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("later", [True, False])
def test_an_update_of_all_weights_is_that_of_each(later: bool) -> None:
    updated = []
    for foreach in (True, False):
        torch.manual_seed(0)
        weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (5,))]
        optimizer = Optimizer(weights, PRECISIONS["fp64"], with_moments=not later, lr=0.1, foreach=foreach)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        updated.append(weights)
    for got, right in zip(*updated, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=0)


def test_an_update_of_all_weights_heeds_no_overflow() -> None:
    with pytest.raises(Unsupported, match="use implementation: fused, or bf16"):
        Optimizer([torch.ones(1)], PRECISIONS["fp16"], with_moments=True, foreach=True)


def test_the_host_reads_positions_once_a_micro_batch_and_counts_samples() -> None:
    assert samples_begun(torch.tensor([0, 1, 2, 0, 1, 0, 0])) == 2  # padding begins none
    model = model_preset("causal-transformer-tiny", {"positions_read": True, "packing_read": True})
    module = model.build(Strategy(), 16)
    with profile() as counted:
        module(model.inputs(2, 16, torch.Generator()))
    counts = {each.key: each.count for each in counted.key_averages()}
    assert (counts["spbench::samples_begun"], counts["spbench::read_by_host"]) == (1, model.layers)


LAYERS = 2
OPTIONS = {
    "layers": LAYERS,
    "hidden": 1024,
    "heads": 8,
    "experts": 16,
    "expert_inner": 1024,
    "shared_inner": 1024,
    "library": "transformer-engine",
    "permutation": "fused",
    "routing": "even",
}


def cell(**options: Any) -> Cell:
    fields = {"model_options": {**OPTIONS, **options}, "training": {"backend": "megatron"}}
    return make_cell("moe-tiny", "single", {"dp": 4, "ep": 4}, 4, 8192, cluster="dgx-h100", **fields)


def program(**options: Any) -> Program:
    traced = tracing.trace(cell(**options), events=True).program
    assert traced is not None
    return traced


@pytest.mark.parametrize(("ep", "waits"), [(1, 0), (4, LAYERS)])
def test_the_host_waits_for_the_counts_of_tokens_of_each_layer(ep: int, waits: int) -> None:
    fields = {"model_options": OPTIONS, "training": {"backend": "ddp"}}
    spread = make_cell("moe-tiny", "single", {"dp": 4, "ep": ep}, 4, 512, cluster="dgx-h100", **fields)
    traced = tracing.trace(spread, events=True).program
    assert traced is not None
    assert traced.host[: dict(traced.marks)["backward"], HOST_WORK.index("joins")].sum() == waits


def kernels(program: Program) -> Counter[tuple[str, tuple[int, ...]]]:
    at = np.flatnonzero(program.kind == Kind.KERNEL)
    return Counter((program.names[program.name[i]], tuple(program.shape[i])) for i in at)


def parts(program: Program) -> list[tuple[int, int]]:
    """The first and the last kernel of each part that another stream runs."""
    at = np.flatnonzero((program.kind == Kind.KERNEL) & (program.stream != COMPUTE_STREAM))
    begins = [at[0], *(b for a, b in pairwise(at) if (program.stream[a:b] == COMPUTE_STREAM).any())]
    ends = [*(max(at[at < b]) for b in begins[1:]), at[-1]]
    return [*zip(begins, ends, strict=True)]


def waited_for(program: Program) -> list[bool]:
    """Whether the computing stream waits for each part before the next begins."""
    of_parts = parts(program)
    ends = [begin for begin, _ in of_parts[1:]] + [len(program)]
    waits = np.flatnonzero((program.kind == Kind.WAIT) & (program.stream == COMPUTE_STREAM))
    partners = program.partner[waits]
    points = (program.kind[partners] == Kind.RECORD) & (program.stream[partners] != COMPUTE_STREAM)
    return [
        bool((points & (partners > last) & (waits < end)).any())
        for (_, last), end in zip(of_parts, ends, strict=True)
    ]


def test_the_same_kernels_run_and_the_computing_stream_waits_before_it_needs_them() -> None:
    alone, beside = program(), program(shared_overlap=True)
    assert kernels(beside) == kernels(alone)
    assert not (alone.stream != COMPUTE_STREAM).any()
    # forward and backward of two parts a layer, of which the second is used
    assert waited_for(beside) == [False, True] * 2 * LAYERS
    matmuls = [
        sum("mm" in beside.names[beside.name[i]] for i in range(first, last + 1) if beside.stream[i])
        for first, last in parts(beside)
    ]
    assert matmuls == [1, 1] * LAYERS + [2, 2] * LAYERS


@pytest.mark.parametrize("fault", ["wait", "leave"])
def test_a_stream_that_is_not_waited_for_or_not_left_is_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SideStream, fault, lambda self, *gradients: None)
    beside = program(shared_overlap=True)
    assert len(parts(beside)) != 4 * LAYERS or waited_for(beside) != [False, True] * 2 * LAYERS


def test_shared_experts_hide_behind_what_is_sent() -> None:
    alone, beside = (run_cell(cell(shared_overlap=each)) for each in (False, True))
    assert beside.step_time_s < 0.99 * alone.step_time_s
    assert beside.communication == alone.communication


def test_swiglu() -> None:
    y = made(3, 5, 2, 7)
    assert_same(activations.swiglu, lambda y: F.silu(y[..., 0, :]) * y[..., 1, :], y)
    assert bytes_kept(lambda: activations.swiglu(y)) == y.nbytes


def test_swiglu_with_a_bias() -> None:
    y, bias = made(3, 5, 2, 7), made(2, 7, seed=1)
    plain = lambda y, bias: F.silu(y[..., 0, :] + bias[0]) * (y[..., 1, :] + bias[1])  # noqa: E731
    assert_same(activations.swiglu, plain, y, bias)
    assert bytes_kept(lambda: activations.swiglu(y, bias)) == y.nbytes + bias.nbytes


def test_clamped_swiglu_times_weights() -> None:
    y = (torch.randn(5, 2, 6, dtype=torch.float64) * 6).requires_grad_()  # some beyond 7
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert (y.abs() > 7).any()
    gate, up = y.unbind(-2)
    product = ACTIVATIONS["clamped_silu"](gate) * FACTORS["clamped_silu"](up) * weights[:, None]
    gradient = torch.randn_like(product)
    expected = torch.autograd.grad(product, (y, weights), gradient)
    ours = activations.weighted_swiglu(y, weights, clamped=True)
    torch.testing.assert_close(ours, product)
    torch.testing.assert_close(torch.autograd.grad(ours, (y, weights), gradient), expected)


def test_swiglu_in_place() -> None:
    gate, up = made(3, 5, 7), made(3, 5, 7, seed=1)
    # of copies, which backward may overwrite
    assert_same(lambda a, b: activations.swiglu_in_place(a * 1, b * 1), lambda a, b: F.silu(a) * b, gate, up)
    projected = gate.detach().clone().requires_grad_()
    assert bytes_kept(lambda: activations.swiglu_in_place(projected, up)) == 2 * gate.nbytes
    (d_gate,) = torch.autograd.grad(
        activations.swiglu_in_place(made_of := gate * 1, up.detach()).sum(), made_of
    )
    assert d_gate.data_ptr() == made_of.data_ptr()


def test_squared_relu() -> None:
    x = made(3, 5, 7)
    assert_same(activations.squared_relu, lambda x: F.relu(x).pow(2), x)
    assert bytes_kept(lambda: activations.squared_relu(x)) == x.nbytes


def test_rotary() -> None:
    angle = torch.arange(5.0, dtype=torch.float64).unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01])
    angles = torch.cat((angle, angle), -1)
    x = made(2, 3, 5, 6)
    assert_same(lambda x: fused_rotary(x, angles), lambda x: rotated(x, angle.cos(), angle.sin()), x)
    assert bytes_kept(lambda: fused_rotary(x, angles)) == angles.nbytes
    assert_same(lambda x: rotated_by_angles(x, angles), lambda x: rotated(x, angle.cos(), angle.sin()), x)
    assert bytes_kept(lambda: rotated_by_angles(x, angles)) == 2 * angles.nbytes


def test_strided_product_keeps_views() -> None:
    mixed = made(2, 4, 3, 3, 5)  # [B, L, Z, 3, A], of which queries and keys are views

    def scores(mixed: Tensor, product: object) -> Tensor:
        q, k, _ = (x.transpose(1, 2) for x in mixed.unbind(-2))
        return product(q, k.mT)  # type: ignore[operator]

    assert_same(lambda x: scores(x, projection.strided_product), lambda x: scores(x, torch.matmul), mixed)


def test_softmax_of_scores_is_causal_without_a_mask() -> None:
    scores = made(2, 3, 5, 5)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    plain = lambda x: torch.softmax(x.masked_fill(later, -torch.inf), -1)  # noqa: E731
    # backward works in the gradient's memory, which a weighted sum makes anew
    assert_same(lambda x: softmax_of_scores(x, None, "fused") * 1.0, plain, scores)
    for way in ("plain", "in_float32"):
        assert_same(lambda x, way=way: softmax_of_scores(x, None, way), plain, scores)
    half = made(2, 3, 5, 5, dtype=torch.bfloat16)
    assert bytes_kept(lambda: softmax_of_scores(half, None, "in_float32")) == 2 * half.nbytes


def test_cross_entropy_in_place_overwrites_the_logits_with_their_gradient() -> None:
    logits, labels = made(2, 3, 11), torch.randint(11, (2, 3), generator=torch.Generator().manual_seed(5))

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    # of a copy, for the operator takes the memory of what it is given
    assert_same(lambda x: cross_entropy_in_place(x.clone(), labels, None), plain, logits)
    half = logits.detach().bfloat16().requires_grad_().clone()
    assert bytes_kept(lambda: cross_entropy_in_place(half, labels, None)) == half.nbytes
    assert bytes_kept(lambda: cross_entropy_in_one_region(half, labels, None)) < 2 * half.nbytes
    assert_same(lambda x: compiled_cross_entropy(x, labels, None), plain, logits)
    assert_same(lambda x: cross_entropy_in_one_region(x, labels, None), plain, logits)


def test_cross_entropy_of_a_rank_without_tokens() -> None:
    none = torch.zeros(1, 0, dtype=torch.int64)
    for way in (cross_entropy_in_place, cross_entropy_in_one_region):
        logits = made(1, 0, 11)
        loss = way(logits.clone(), none, None)
        loss.sum().backward()
        assert loss.shape == none.shape
        assert logits.grad is not None


@pytest.mark.parametrize("heads", [4, 2])
def test_flash_attention_of_all_keys_keeps_one_output(heads: int) -> None:
    q, k, v = made(2, 4, 6, 8), made(2, heads, 6, 8, seed=1), made(2, heads, 6, 8, seed=2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads < 4)

    assert_same(causal_flash_attention, plain, q, k, v)
    with FakeTensorMode():
        q = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16)
        o = causal_flash_attention(q, q, q)
    assert o.transpose(1, 2).is_contiguous()  # so [B, L, H] of it is a view


def test_dropout_of_flash_attention_draws_the_same_mask_in_backward() -> None:
    q, k, v = made(2, 4, 6, 8), made(2, 2, 6, 8, seed=1), made(2, 2, 6, 8, seed=2)
    without = lambda *x: dropout_flash_attention(*x, 0.0, 3)  # noqa: E731
    assert_same(without, causal_flash_attention, q, k, v)
    assert torch.autograd.gradcheck(lambda *x: dropout_flash_attention(*x, 0.4, 3), (q, k, v))
    dropped = [dropout_flash_attention(q, k, v, 0.4, seed) for seed in (3, 3, 4)]
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.allclose(dropped[0], dropped[2])


@pytest.mark.parametrize("library", ["torch", "transformer-engine"])
@pytest.mark.parametrize("fused", [False, True])
def test_projection(library: str, fused: bool) -> None:
    layer = nn.Linear(5, 7, dtype=torch.float64)
    projection.mark_library(layer, library)
    x = made(2, 3, 5)
    main = torch.ones(7, 5, dtype=torch.float64)
    if fused:
        projection.fuse_accumulation(layer.weight, main, projection.Placeholders())
    y = projection.project(x, layer.weight, layer.bias)
    expected = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, expected)
    d_y = made(2, 3, 7, seed=4).detach()
    wanted = torch.autograd.grad(expected, (x, layer.weight, layer.bias), d_y)
    y.backward(d_y)
    torch.testing.assert_close(x.grad, wanted[0])
    torch.testing.assert_close(layer.bias.grad, wanted[2])
    torch.testing.assert_close(main - 1 if fused else layer.weight.grad, wanted[1])
    assert getattr(layer.weight, "grad_added_to_main_grad", False) == fused


def test_placeholders_of_one_shape_share_memory() -> None:
    made_once = projection.Placeholders()
    first, second = made_once.like(torch.empty(3, 4)), made_once.like(torch.zeros(3, 4))
    other = made_once.like(torch.empty(4, 3))
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()


def test_a_reused_buffer_grows_and_is_kept() -> None:
    buffer, like = ReusedBuffer(), torch.empty(0)
    first = buffer.take((2, 3), like)
    assert buffer.take((3, 2), like).data_ptr() == first.data_ptr()
    assert buffer.take((4, 4), like).shape == (4, 4)
    assert buffer.take((2, 3), like).data_ptr() != first.data_ptr()
