"""Every operator's fake implementation against its real one."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.impls import kernels
from spbench.impls.attended import Range, Ranges
from spbench.impls.kernels.flash_attention import flash_attention
from spbench.impls.kernels.linear_attention import linear_attention_state_gradients, linear_attention_states
from spbench.impls.kernels.packed_weights import initial_scales
from tests.impls.kernels.made import bits, made, recurrence_arguments

for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
    if not module.name.endswith("_triton"):  # these are no operators, and triton is not everywhere
        import_module(module.name)
for module_of_backends in ("optimizer", "megatron_options"):  # each has an operator
    import_module(f"spbench.impls.backends.{module_of_backends}")

HALF = [torch.float16, torch.bfloat16]
OPS = torch.ops.spbench


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
        "flash_attention with smaller values": (q, k, v, 0.5, True),
        "flash_attention_backward with smaller values": (v, q, k, v, v, lse, 0.5, True),
        "flash_attention_backward": (o, q, k, v, o, lse, 0.5, True),
        "masked_scale": (x, kept, 1.25),
        "bias_dropout_add": (x, row, y, kept, 1.25),
        "silu_times": (x, y),
        "silu_times_backward_": (x, y.clone(), x.clone()),
        "silu_times_backward": (x, y.clone(), x.clone()),
        "bias_gelu": (x, row),
        "bias_gelu_backward": (y, x, row),
        "host_empty_like": (x,),
        "pageable_empty_like": (x,),
        "host_zeros": (x, [2, 3], dtype),
        "pageable_zeros": (x, [2, 3], dtype),
        "_fused_adamw_narrow_": ([x], [y], [x.clone()], [y.abs()], 1, [0.1, 0.9, 0.99, 1e-8, 0.01]),
        "host_adamw_": ([x], [y], [x.clone()], [y.abs()], [torch.zeros(())], 0.1, 0.01, torch.ones(())),
        "host_copy_": (y.float(), x),
        "host_add_": (y.clone(), x),
        "host_unscale_": ([x, y], torch.zeros(()), torch.tensor(2.0)),
        "to_host_": (y.clone(), x),
        "to_device_": (y.clone(), x),
        "to_pageable_": (y.clone(), x),
        "from_pageable_": (y.clone(), x),
        "samples_begun": (torch.arange(4),),
        "read_by_host": (torch.arange(4).sum(),),
        "layer_norm": (x, row, row, 1e-5),
        "layer_norm_backward": (y, x, statistics, statistics, row, row),
        "linear_attention_states": (scores, v, rates, 3),
        "linear_attention_output": (scores, scores, v, rates, states, before, 3),
        "linear_attention_state_gradients": (scores, v, None, 3),
        "linear_attention_input_gradients": (scores, scores, v, v, rates, states, None, d_states, before, 3),
        "rms_norm": (x, row, 1e-6, False),
        "rms_norm_backward": (y, x, statistics, row),
        "rms_norm without a weight": (x, None, 1e-6, True),
        "rms_norm_backward without a weight": (y, x, statistics, None),
        "masked_softmax": (scores, bits(2, 1, 1, 8), 0.5, False),
        "masked_softmax_backward_": (scores.clone(), scores, 0.5),
        **_library_arguments(x, y, q, k, lse),
        **_indexed_arguments(q, k[:, 0], v, lse),
        **_packed_arguments(q, k, scores, v, rates, before),
        **recurrence_arguments(tensor),
    }


def _indexed_arguments(q: Tensor, rows: Tensor, d_o: Tensor, lse: Tensor) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operators of an indexer; q [2, 2, 4, 8], rows [2, 4, 8], d_o [2, 2, 4, 5], lse
    [2, 2, 4]."""
    bounds, chosen = torch.tensor([[0, 2], [1, 3]]), torch.tensor([[0, 1, -1], [3, 1, 2]], dtype=torch.int32)
    chosen = chosen.expand(2, 2, 3).contiguous()
    return {
        "index_scores": (q, rows, q[..., 0], bounds),
        "best_positions": (rows, 3),
        "sparse_attention": (q, rows, chosen, 0.5, 5),
        "sparse_attention_backward": (d_o, q, rows, chosen, d_o, lse, 0.5, 5),
    }


def _packed_arguments(
    q: Tensor, k: Tensor, scores: Tensor, v: Tensor, rates: Tensor, before: Tensor
) -> dict[str, tuple[Any, ...]]:
    """Arguments of the operators of documents, here of 1 and 3 positions; q, k, scores [2, 2, 4, 8], v
    [2, 2, 4, 5], before [2, 2, 8, 5]."""
    ranges = Ranges.of([Range(0, 1, 0, 1, -3, 0), Range(1, 3, 1, 3, -3, 0)]).text  # each causal
    o, lse = OPS.ranged_flash_attention(q, k, k, 0.5, ranges)
    how = rates, 3, [1, 3], False
    states = OPS.packed_linear_attention_states(scores, v, *how)
    d_states = OPS.packed_linear_attention_state_gradients(scores, v, *how)
    inputs = scores, scores, v
    return {
        "ranged_flash_attention": (q, k, k, 0.5, ranges),
        "attention_sinks_gradient": (o, o, lse, torch.zeros(2, dtype=q.dtype)),
        "ranged_flash_attention_backward": (o, q, k, k, o, lse, 0.5, ranges),
        "packed_linear_attention_states": (scores, v, *how),
        "packed_linear_attention_output": (*inputs, rates, states, before, *how[1:]),
        "packed_linear_attention_state_gradients": (scores, v, *how),
        "packed_linear_attention_input_gradients": (
            *(*inputs, v, rates, states, None, d_states, before),
            *how[1:],
        ),
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
        "rotary_": (q.clone(), torch.ones(2, 8, dtype=sums), True),
        "latent_keys_values": (x, y[..., :4], torch.ones(3, 4, dtype=sums), 2, 1),
        "latent_keys_values_backward": (q, k[..., :3], torch.ones(2, 6, dtype=sums)),
        "cross_entropy_statistics": (x, labels, 0),
        "cross_entropy_gradient_": (x.clone(), statistics, labels, 0),
        "cross_entropy_scale_": (x.clone(), y[..., 0].contiguous()),
        "sum_of_squares": ([x, y], [1.0, 0.5]),
        "dropout_flash_attention": (q, k, k, 0.5, 3),
        "dropout_flash_attention with smaller values": (q, k, k[..., :5], 0.5, 3),
        "dropout_flash_attention_backward": (q, q, k, k, q, lse, 0.5, 3),
        **_in_eight_bits(x[0], y[0], main),
        **_of_experts(x[0], y[0], made(2, 8, 8, dtype=x.dtype, seed=6).detach()),
    }


def _in_eight_bits(x: Tensor, y: Tensor, main: Tensor) -> dict[str, tuple[Any, ...]]:
    """Arguments of casts to eight bits and of their matmuls; x, y [3, 8], main [8, 8]."""
    e4m3, half = torch.float8_e4m3fn, torch.bfloat16
    largest = OPS.fp8_amax(x).float()
    a, of_a = OPS.fp8_cast(x, None, e4m3, [1, 4], None, True)
    b, of_b = OPS.fp8_cast(y, None, torch.float8_e5m2, [1, 4], None, True)
    arguments: dict[str, tuple[Any, ...]] = {
        "fp8_amax": (x,),
        "fp8_cast": (x, OPS.fp8_amax(x), e4m3, [0, 0], None, False),
        "fp8_cast transposed": (x, None, e4m3, [1, 2], torch.float8_e8m0fnu, True),
        "fp8_cast_both": (x, None, e4m3, [1, 0], torch.float32),
        "fp8_cast_delayed_": (x, largest, largest.clone(), e4m3, True),
        "fp8_cast_both_delayed_": (x, largest, largest.clone(), e4m3),
        "fp8_update_scales_": (main.float().abs(), main[0].float().abs(), 448.0),
        "fp8_transpose": (a,),
        "fp8_recast": (a, of_a, [1, 4], torch.float32),
    }
    for prefix in ("", "te_"):
        arguments[f"{prefix}fp8_mm"] = (a, b.mT, of_a, of_b.mT, [1, 4, 4, 1], half)
        arguments[f"{prefix}fp8_accumulate_mm_"] = (main.clone(), a, b.mT, of_a, of_b.mT, [1, 4, 4, 1])
    rows = [2, 1]
    data, scale, turned, of_turned = OPS.fp8_cast_rows(x, rows, None, e4m3, [1, 4], None)
    of_weights = turned, turned, of_turned, of_turned, rows, [1, 4]
    return {
        **arguments,
        "fp8_amax_rows": (x, rows),
        "fp8_cast_rows": (x, rows, OPS.fp8_amax_rows(x, rows), e4m3, [0, 0], None),
        "fp8_cast_rows in tiles": (x, rows, None, e4m3, [1, 4], torch.float8_e8m0fnu),
        "te_fp8_grouped_mm": (data, [b, b], scale, [of_b, of_b], rows, [1, 4, 1, 4], half),
        "te_fp8_grouped_mm_weights": (*of_weights, half),
        "te_fp8_grouped_accumulate_mm_": ([main.clone(), main.clone()], *of_weights),
    }


def _of_experts(x: Tensor, y: Tensor, square: Tensor) -> dict[str, tuple[Any, ...]]:
    """Arguments of operators on rows of experts; x, y [3, 8], of which two rows are of the first expert."""
    rows, weights, row_weights = [2, 1], [*square], x[:, 0].contiguous()
    chosen = torch.tensor([[True, True], [False, True], [True, False]])
    permuted, d_weights, row_of = OPS.permute_rows(x, x[:, :2], chosen, 4)
    _, _, order = OPS.sort_rows(x, row_weights, [1, 2], [1, 0])
    pairs = torch.stack((x, y), 1)
    arguments: dict[str, tuple[Any, ...]] = {
        "grouped_bias": (x, weights[0][:2].unbind(), rows, None),
        "grouped_bias with weights": (x, weights[0][:2].unbind(), rows, row_weights),
        "grouped_bias_backward": (x, weights[0][:2].unbind(), rows, None),
        "grouped_bias_backward with weights": (x, weights[0][:2].unbind(), rows, row_weights),
        "permute_rows": (x, x[:, :2], chosen, 4),
        "permute_rows_backward": (permuted, d_weights, row_of),
        "unpermute_rows": (permuted, row_of),
        "unpermute_rows_backward": (y, row_of, 4),
        "sent_rows": (x, order),
        "exchanged_pieces": (x.t(),),
        "summed_rows": (x, order, 4),
        "sort_rows": (x, row_weights, [1, 2], [1, 0]),
        "sort_rows_backward": (y, row_weights, order),
        "te_mm_to": (x, y.mT, torch.float64),
        "weighted_swiglu": (pairs, row_weights, False),
        "weighted_swiglu_backward": (x, pairs, row_weights, True),
    }
    arguments["stacked_mm"] = (x, square, rows)
    for few in (4, 8):
        scales = initial_scales(torch.Size([*x.shape[:-1], x.shape[-1] * 16 // few]), few)
        arguments[f"unpack_weight of {few} bits"] = (x, scales, few)
    arguments["stacked_mm_weights"] = (x, y, rows)
    arguments["stacked_accumulate_mm_"] = (square.double(), x, y, rows)
    for library in ("", "te_"):
        arguments[f"{library}grouped_mm"] = (x, weights, rows)
        arguments[f"{library}grouped_mm_weights"] = (x, y, rows)
        arguments[f"{library}grouped_accumulate_mm_"] = ([w.double() for w in weights], x, y, rows)
    return arguments


@pytest.mark.one_in(5)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@pytest.mark.parametrize("name", _arguments(torch.float32, False))
def test_fake_is_like_the_real_operator(name: str, dtype: torch.dtype, transposed: bool) -> None:
    """The declared mutation, and that shapes, dtypes, strides and devices agree."""
    operator, arguments = getattr(OPS, name.split()[0]).default, _arguments(dtype, transposed)[name]
    # test_schema compares arguments by sums, which torch has none of in eight bits
    in_eight_bits = any(
        isinstance(x, Tensor) and x.itemsize == 1 and x.is_floating_point() for x in arguments
    )
    tests = ("test_faketensor",) if in_eight_bits else ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, arguments, test_utils=tests)


def test_every_operator_is_checked() -> None:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("spbench::"))
    registered = {name.split("::")[1].split(".")[0] for name in names}
    assert registered == {name.split()[0] for name in _arguments(torch.float32, False)}
