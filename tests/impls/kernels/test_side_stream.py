"""Shared experts beside the dispatch: which operators their stream has, what waits for what, and that their
time hides behind what is sent. Kernels of fused libraries against torch's own operators, and what they keep.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, KERNEL, RECORD, WAIT, Program
from spbench.impls.collectives import ReusedBuffer
from spbench.impls.kernels.activations import squared_relu, swiglu, swiglu_in_place, weighted_swiglu
from spbench.impls.kernels.cross_entropy import (
    compiled_cross_entropy,
    cross_entropy_in_one_region,
    cross_entropy_in_place,
)
from spbench.impls.kernels.dropout_attention import dropout_flash_attention
from spbench.impls.kernels.flash_attention import causal_flash_attention
from spbench.impls.kernels.projection import (
    Placeholders,
    fuse_accumulation,
    mark_library,
    project,
    strided_product,
)
from spbench.impls.kernels.rotary import fused_rotary, rotated, rotated_by_angles
from spbench.impls.kernels.side_stream import SideStream
from spbench.impls.kernels.softmax import softmax_of_scores
from spbench.impls.models.blocks.feed_forward import ACTIVATIONS, FACTORS
from tests.impls.kernels.made import assert_same, bytes_kept, made

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
    asked = {
        "model": "moe-tiny",
        "model_options": {**OPTIONS, **options},
        "strategy": "single",
        "sizes": {"dp": 4, "ep": 4},
        "batch": 4,
        "seq_len": 8192,
        "precision": "bf16",
        "cluster": "dgx-h100",
        "training": {"backend": "megatron"},
    }
    return Cell.model_validate(asked)


def program(**options: Any) -> Program:
    traced = tracing.trace(cell(**options), events=True).program
    assert traced is not None
    return traced


def kernels(program: Program) -> Counter[tuple[str, tuple[int, ...]]]:
    at = np.flatnonzero(program.kind == KERNEL)
    return Counter((program.names[program.name[i]], tuple(program.shape[i])) for i in at)


def parts(program: Program) -> list[tuple[int, int]]:
    """The first and the last kernel of each part that another stream runs."""
    at = np.flatnonzero((program.kind == KERNEL) & (program.stream != COMPUTE_STREAM))
    begins = [at[0], *(b for a, b in pairwise(at) if (program.stream[a:b] == COMPUTE_STREAM).any())]
    ends = [*(max(at[at < b]) for b in begins[1:]), at[-1]]
    return [*zip(begins, ends, strict=True)]


def waited_for(program: Program) -> list[bool]:
    """Whether the computing stream waits for each part before the next begins."""
    of_parts = parts(program)
    ends = [begin for begin, _ in of_parts[1:]] + [len(program)]
    waits = np.flatnonzero((program.kind == WAIT) & (program.stream == COMPUTE_STREAM))
    partners = program.partner[waits]
    points = (program.kind[partners] == RECORD) & (program.stream[partners] != COMPUTE_STREAM)
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
    monkeypatch.setattr(SideStream, fault, lambda self: None)
    beside = program(shared_overlap=True)
    assert len(parts(beside)) != 4 * LAYERS or waited_for(beside) != [False, True] * 2 * LAYERS


def test_shared_experts_hide_behind_what_is_sent() -> None:
    alone, beside = (run_cell(cell(shared_overlap=each)) for each in (False, True))
    assert beside.step_time_s < 0.99 * alone.step_time_s
    assert beside.communication == alone.communication


def test_swiglu() -> None:
    y = made(3, 5, 2, 7)
    assert_same(swiglu, lambda y: F.silu(y[..., 0, :]) * y[..., 1, :], y)
    assert bytes_kept(lambda: swiglu(y)) == y.nbytes


def test_swiglu_with_a_bias() -> None:
    y, bias = made(3, 5, 2, 7), made(2, 7, seed=1)
    plain = lambda y, bias: F.silu(y[..., 0, :] + bias[0]) * (y[..., 1, :] + bias[1])  # noqa: E731
    assert_same(swiglu, plain, y, bias)
    assert bytes_kept(lambda: swiglu(y, bias)) == y.nbytes + bias.nbytes


def test_clamped_swiglu_times_weights() -> None:
    y = (torch.randn(5, 2, 6, dtype=torch.float64) * 6).requires_grad_()  # some beyond 7
    weights = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert (y.abs() > 7).any()
    gate, up = y.unbind(-2)
    product = ACTIVATIONS["clamped_silu"](gate) * FACTORS["clamped_silu"](up) * weights[:, None]
    gradient = torch.randn_like(product)
    expected = torch.autograd.grad(product, (y, weights), gradient)
    ours = weighted_swiglu(y, weights, clamped=True)
    torch.testing.assert_close(ours, product)
    torch.testing.assert_close(torch.autograd.grad(ours, (y, weights), gradient), expected)


def test_swiglu_in_place() -> None:
    gate, up = made(3, 5, 7), made(3, 5, 7, seed=1)
    # of copies, which backward may overwrite
    assert_same(lambda a, b: swiglu_in_place(a * 1, b * 1), lambda a, b: F.silu(a) * b, gate, up)
    projected = gate.detach().clone().requires_grad_()
    assert bytes_kept(lambda: swiglu_in_place(projected, up)) == 2 * gate.nbytes
    (d_gate,) = torch.autograd.grad(swiglu_in_place(made_of := gate * 1, up.detach()).sum(), made_of)
    assert d_gate.data_ptr() == made_of.data_ptr()


def test_squared_relu() -> None:
    x = made(3, 5, 7)
    assert_same(squared_relu, lambda x: F.relu(x).pow(2), x)
    assert bytes_kept(lambda: squared_relu(x)) == x.nbytes


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

    assert_same(lambda x: scores(x, strided_product), lambda x: scores(x, torch.matmul), mixed)


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
    mark_library(layer, library)
    x = made(2, 3, 5)
    main = torch.ones(7, 5, dtype=torch.float64)
    if fused:
        fuse_accumulation(layer.weight, main, Placeholders())
    y = project(x, layer.weight, layer.bias)
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
    made_once = Placeholders()
    first, second = made_once.like(torch.empty(3, 4)), made_once.like(torch.zeros(3, 4))
    other = made_once.like(torch.empty(4, 3))
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()


def test_a_reused_buffer_grows_and_is_kept() -> None:
    buffer, like = ReusedBuffer(), torch.empty(0)
    first = buffer.take((2, 3), like)
    assert buffer.take((3, 2), like).data_ptr() == first.data_ptr()
    assert buffer.take((4, 4), like).shape == (4, 4)
    assert buffer.take((2, 3), like).data_ptr() != first.data_ptr()
