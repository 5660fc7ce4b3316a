"""Activations of MLPs, each as one operator that keeps only its inputs for backward.

- :func:`swiglu` (arXiv 2002.05202), with a bias or without, as Megatron-LM's bias_swiglu.
- :func:`silu_times` of two projections, as torch.compile fuses SiLU and multiplication.
- :func:`swiglu_in_place` of two projections, as Liger's kernel (liger_kernel/ops/swiglu.py,
  ``LigerSiLUMulFunction``): backward writes the gradients into the memory of the projections, allocates
  nothing, and can run only once.
- :func:`squared_relu` (arXiv 2109.08668), which Megatron-LM compiles.
- :func:`bias_gelu`, gelu(x + bias), as Megatron-LM's.
- :func:`weighted_swiglu`, SwiGLU times a weight a row, as Megatron-LM's weighted_bias_swiglu of experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.impls.kernels.operator import differentiable, operator


@operator("spbench::silu_times", fake=lambda gate, up: torch.empty_like(gate))
def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


def _silu_gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up from that of silu(gate) * up; allocates only these two tensors."""
    d_gate = gradient * up
    torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
    return d_gate, F.silu(gate).mul_(gradient)


@operator("spbench::silu_times_backward_", mutates_args={"gate", "up"})
def _silu_times_backward_(gradient: Tensor, gate: Tensor, up: Tensor) -> None:
    """Overwrite ``gate`` and ``up`` with their gradients."""
    d_gate, d_up = _silu_gradients(gradient, gate, up)
    up.copy_(d_up)
    gate.copy_(d_gate)


@operator(
    "spbench::silu_times_backward",
    fake=lambda gradient, gate, up: (torch.empty_like(gradient), torch.empty_like(gradient)),
)
def _silu_times_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _silu_gradients(gradient, gate, up)


_SILU_TIMES = differentiable(_silu_times, _silu_times_backward)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of gate and up [..., F]; keeps gate and up, as torch.compile's fusion does."""
    return _SILU_TIMES(gate, up)


def _in_place(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _silu_times_backward_(gradient, gate, up)
    return gate, up


_SWIGLU_IN_PLACE = differentiable(_silu_times, _in_place)


def swiglu_in_place(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of gate and up [..., F], which nothing else may read after forward."""
    return _SWIGLU_IN_PLACE(gate, up)


@operator("spbench::squared_relu", fake=lambda x: torch.empty_like(x))
def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


@operator("spbench::squared_relu_backward", fake=lambda gradient, x: torch.empty_like(x))
def _squared_relu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(gradient)


_SQUARED_RELU = differentiable(_squared_relu, _squared_relu_backward)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 of x [...]."""
    return _SQUARED_RELU(x)


@operator("spbench::bias_gelu", fake=lambda x, bias: torch.empty_like(x))
def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten.gelu_(x + bias, approximate="tanh")


@operator("spbench::bias_gelu_backward", fake=lambda gradient, x, bias: torch.empty_like(x))
def _bias_gelu_backward(gradient: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    d_x = x + bias
    return torch.ops.aten.gelu_backward.grad_input(gradient, d_x, approximate="tanh", grad_input=d_x)


def _bias_gelu_gradients(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    d_x = _bias_gelu_backward(gradient, x, bias)
    return d_x, d_x.flatten(0, -2).sum(0)


_BIAS_GELU = differentiable(_bias_gelu, _bias_gelu_gradients)


def bias_gelu(x: Tensor, bias: Tensor, *, fused: bool) -> Tensor:
    """gelu(x + bias) with the tanh approximation, x [..., F], bias [F].

    The fused operator keeps x; unfused, x + bias is kept, and for a moment exists together with x.
    """
    return _BIAS_GELU(x, bias) if fused else F.gelu(x + bias, approximate="tanh")


def _gate_and_up(y: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    return (y if bias is None else y + bias).unbind(-2)


@operator("spbench::swiglu", fake=lambda y, bias: y.new_empty(*y.shape[:-2], y.shape[-1]))
def _swiglu(y: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(y, bias)
    return F.silu(gate).mul_(up).contiguous()


@operator("spbench::swiglu_backward", fake=lambda gradient, y, bias: y.new_empty(y.shape))
def _swiglu_backward(gradient: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _gate_and_up(y, bias)
    return torch.stack(_silu_gradients(gradient, gate, up), -2).contiguous()


def _swiglu_gradients(gradient: Tensor, y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    d_y = _swiglu_backward(gradient, y, bias)
    return d_y, None if bias is None else d_y.flatten(0, -3).sum(0)


_SWIGLU = differentiable(_swiglu, _swiglu_gradients)


def swiglu(y: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up [..., F], where y [..., 2, F] plus the bias [2, F] holds gate and up."""
    return _SWIGLU(y, bias)


#: constants of gpt-oss's SwiGLU: the largest input, and the factor of sigmoid's input
CLAMP, SLOPE = 7.0, 1.702


def _clamped_gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the inputs gate and up of :func:`clamped_product`."""
    below, share = gate.clamp(max=CLAMP), (SLOPE * gate.clamp(max=CLAMP)).sigmoid()
    d_gate = gradient * (up.clamp(-CLAMP, CLAMP) + 1) * share * (1 + SLOPE * below * (1 - share))
    return d_gate * (gate <= CLAMP), gradient * below * share * (up.abs() <= CLAMP)


def clamped_silu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), x clamped to at most 7, as in gpt-oss (modeling_gpt_oss.py of transformers)."""
    x = x.clamp(max=CLAMP)
    return x * (SLOPE * x).sigmoid()


def clamped_plus_one(x: Tensor) -> Tensor:
    """x + 1, with x clamped to [-7, 7], which gpt-oss's MLP multiplies with :func:`clamped_silu`."""
    return x.clamp(-CLAMP, CLAMP) + 1


def clamped_product(gate: Tensor, up: Tensor) -> Tensor:
    """g sigmoid(1.702 g) (u + 1) of gate g and up u, each clamped at 7."""
    return clamped_silu(gate) * clamped_plus_one(up)


@operator("spbench::weighted_swiglu", fake=lambda y, weights, clamped: y.new_empty(y.shape[0], y.shape[2]))
def _weighted_swiglu(y: Tensor, weights: Tensor, clamped: bool) -> Tensor:
    gate, up = y.unbind(-2)
    product = clamped_product(gate, up) if clamped else F.silu(gate) * up
    return (product * weights[:, None]).to(y.dtype).contiguous()


@operator(
    "spbench::weighted_swiglu_backward",
    fake=lambda gradient, y, weights, clamped: (torch.empty_like(y), torch.empty_like(weights)),
)
def _weighted_swiglu_backward(
    gradient: Tensor, y: Tensor, weights: Tensor, clamped: bool
) -> tuple[Tensor, Tensor]:
    gate, up = y.unbind(-2)
    product = clamped_product(gate, up) if clamped else F.silu(gate) * up
    d_weights = (gradient * product).sum(-1).to(weights.dtype)
    gradients = _clamped_gradients if clamped else _silu_gradients
    both = gradients(gradient * weights[:, None], gate, up)
    return torch.stack(both, -2).to(y.dtype).contiguous(), d_weights


_WEIGHTED_SWIGLU = differentiable(_weighted_swiglu, _weighted_swiglu_backward)


def weighted_swiglu(y: Tensor, weights: Tensor, *, clamped: bool = False) -> Tensor:
    """silu(gate) * up * weight [R, F], where y [R, 2, F] holds gate and up, and weights are [R]. ``clamped``
    takes :func:`clamped_product` instead of silu(gate) * up, as NeMo Automodel compiles gpt-oss's experts
    (components/moe/experts.py, quick_geglu_deepep)."""
    return _WEIGHTED_SWIGLU(y, weights, clamped)
