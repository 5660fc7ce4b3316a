"""A projection x W^T + b by one of several libraries, which can add its weight's gradient to a buffer.

If a weight has an attribute ``main_grad`` (float32, of its shape; Megatron-LM's name), the matmul that
computes the gradient adds it there (Megatron-LM's --gradient-accumulation-fusion). In place of the gradient,
autograd gets a placeholder without values, one for each shape, which stays allocated, as in TransformerEngine
(get_dummy_wgrad of transformer_engine/pytorch/module/base.py, 2.x). ``grad_added_to_main_grad`` of the weight
is then true, until a hook that reads it makes it false.

Each library has its own workspace, which its first matmul allocates. So TransformerEngine's matmuls are
operators of their own, next to torch's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.operator import differentiable, operator
from spbench.impls.kernels.packed_weights import packed_of

#: operators that torch runs through its own cuBLAS handles, whose workspaces torch's allocator holds
TORCH_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "strided_bmm", "accumulate_mm_", "fp8_mm", "fp8_accumulate_mm_"}
)
#: operators of TransformerEngine, which all use one workspace
TRANSFORMER_ENGINE_PRODUCTS = frozenset(
    {"te_mm", "te_mm_to", "te_accumulate_mm_", "te_fp8_mm", "te_fp8_accumulate_mm_"}
)
#: further workspaces for TransformerEngine's matmuls that overlap with collectives (_NUM_MAX_UB_STREAMS of
#: transformer_engine/pytorch/cpp_extensions/gemm.py)
USERBUFFER_STREAMS = 3


@operator("spbench::te_mm", fake=lambda a, b: a.new_empty(*a.shape[:-1], b.shape[1]))
def te_mm(a: Tensor, b: Tensor) -> Tensor:
    """The matmul of a [..., k] and b [k, n], [..., n], by TransformerEngine."""
    return torch.matmul(a, b).contiguous()


@operator("spbench::te_mm_to", fake=lambda a, b, dtype: a.new_empty(a.shape[0], b.shape[1], dtype=dtype))
def te_mm_to(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The matmul of a [m, k] and b [k, n] as [m, n] in ``dtype``, without a copy of a or b in ``dtype``."""
    return torch.matmul(a.to(dtype), b.to(dtype)).contiguous()


def _accumulate(into: Tensor, a: Tensor, b: Tensor) -> None:
    into.addmm_(a.to(into.dtype), b.to(into.dtype))


@operator("spbench::accumulate_mm_", mutates_args={"into"})
def accumulate_mm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] times b [k, n] to ``into`` [m, n], in the precision of ``into``."""
    _accumulate(into, a, b)


@operator("spbench::te_accumulate_mm_", mutates_args={"into"})
def te_accumulate_mm_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """As :func:`accumulate_mm_`, but by TransformerEngine."""
    _accumulate(into, a, b)


@operator("spbench::strided_bmm", fake=lambda a, b, scale: a.new_empty(*a.shape[:-1], b.shape[-1]))
def _strided_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.matmul(a, b).mul_(scale).contiguous()


_STRIDED_PRODUCT = differentiable(
    _strided_bmm, lambda d_y, a, b, scale: (_strided_bmm(d_y, b.mT, scale), _strided_bmm(a.mT, d_y, scale))
)


def strided_product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale times the matmul of a [B, Z, m, k] and b [B, Z, k, n], a contiguous [B, Z, m, n]. a and b may be
    views (of [L, B, H] hidden states, whose batches lie at one stride), which are kept without a copy."""
    result: Tensor = _STRIDED_PRODUCT(a, b, scale)
    return result


TRANSFORMER_ENGINE = "transformer-engine"
#: the libraries of a model's layers, which decide the tensors kept for backward and the workspaces
LIBRARIES = ("torch", "megatron-local", TRANSFORMER_ENGINE)


class Placeholders:
    """Gradients without values, one for each shape and dtype, which the owner of the weights keeps."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def like(self, weight: Tensor) -> Tensor:
        """A tensor of the shape and dtype of the weight's gradient; all tensors of one shape share memory."""
        dtype = getattr(weight, "grad_dtype", None) or weight.dtype  # weights in eight bits have another
        key = weight.shape, dtype
        if key not in self._made:
            self._made[key] = torch.empty_like(weight, dtype=dtype)
        return self._made[key].detach()


class PutOff:
    """Matmuls for a weight's gradient that are put off until :meth:`add_up`, so that their operands stay
    allocated (Megatron-LM's --defer-embedding-wgrad-compute).

    Args:
        weight: the weight, whose gradient is added to its ``main_grad``.
        limit: the number of matmuls that are put off, the first ones of a step; 0: all of a step's matmuls.
    """

    def __init__(self, weight: nn.Parameter, limit: int):
        self.weight, self.limit = weight, limit
        self._operands: list[tuple[Tensor, Tensor]] = []
        weight.spbench_put_off = self  # type: ignore[attr-defined]

    def kind(self, number: int) -> int:
        """A key of the backward with this number in a step, equal for backwards that put off as much."""
        return min(number, self.limit) if self.limit else number

    def takes(self, d_rows: Tensor, rows: Tensor) -> bool:
        """Whether the matmul of d_rows [T, F] and rows [T, H] is put off; if so, both tensors are kept."""
        if self.limit and len(self._operands) == self.limit:
            return False
        self._operands.append((d_rows, rows))
        return True

    def add_up(self) -> None:
        """Add the results of the matmuls that were put off to the main gradient."""
        while self._operands:
            add_to_main_grad(self.weight, *self._operands.pop(0))


def mark_library(module: nn.Module, library: str) -> None:
    """Record on each weight of a module the library, one of LIBRARIES, that multiplies with the weight."""
    for parameter in module.parameters():
        parameter.spbench_library = library  # type: ignore[attr-defined]


def mark_rows(rows: Tensor, library: str) -> Tensor:
    """Record on ``rows``, some rows of a weight, the library that multiplies with the weight; returns
    ``rows``."""
    rows.spbench_library = library  # type: ignore[attr-defined]
    return rows


def fuse_accumulation(weight: nn.Parameter, main_grad: Tensor, placeholders: Placeholders) -> None:
    """Have matmuls for the weight's gradient add it to ``main_grad``, which has the weight's shape."""
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    weight.spbench_placeholders = placeholders  # type: ignore[attr-defined]


def is_plain(weight: Tensor) -> bool:
    """Whether torch multiplies with the weight and autograd accumulates its gradient, and the program has no
    function of its own for that (``spbench_own_function``), which keeps its operands after the matmul."""
    own = getattr(weight, "spbench_own_function", False) or _by_transformer_engine(weight)
    return not own and getattr(weight, "main_grad", None) is None and packed_of(weight) is None


def library_of(weight: Tensor) -> str:
    """Which of LIBRARIES multiplies with a weight."""
    library: str = getattr(weight, "spbench_library", "torch")
    return library


def _by_transformer_engine(weight: Tensor) -> bool:
    return library_of(weight) == TRANSFORMER_ENGINE


def matrix(weight: Tensor) -> Tensor:
    """A view of a weight [..., F, H] as [all F, H]; for a packed weight, an unpacked copy."""
    if (packed := packed_of(weight)) is not None:
        weight = packed.unpacked(weight)
    return weight if weight.ndim == 2 else weight.flatten(0, -2)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b [..., F] for x [..., H], by the weight's library."""
    if not _by_transformer_engine(weight):
        return F.linear(x, matrix(weight), None if bias is None else bias.flatten())
    y = te_mm(x, matrix(weight).mT)
    return y if bias is None else y.add_(bias.flatten())


def input_gradient(d_y: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x [..., H], from the gradient d_y [..., F] of y = x W^T."""
    product = te_mm if _by_transformer_engine(weight) else torch.matmul
    return product(d_y, matrix(weight))


def add_input_gradient(into: Tensor, d_y: Tensor, weight: Tensor) -> None:
    """Add :func:`input_gradient` of d_y [B, L, F] to ``into`` [B, L, H]; with torch's library, this takes no
    tensor for the gradient."""
    if _by_transformer_engine(weight):
        into.add_(input_gradient(d_y, weight))
    else:
        into.baddbmm_(d_y, matrix(weight).expand(len(d_y), -1, -1))


def weight_gradient(d_y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, in the weight's shape and dtype. If the weight has a ``main_grad``, the
    gradient is added to that buffer, and a placeholder is returned."""
    d_rows, rows = (t.reshape(-1, t.shape[-1]) for t in (d_y, x))
    main = getattr(weight, "main_grad", None)
    if main is None:
        product = te_mm if _by_transformer_engine(weight) else torch.mm
        return product(d_rows.mT, rows).view(weight.shape)
    put_off: PutOff | None = getattr(weight, "spbench_put_off", None)
    if put_off is None or not put_off.takes(d_rows, rows):
        add_to_main_grad(weight, d_rows, rows)
    return added_to_main_grad(weight)


def add_to_main_grad(weight: Tensor, d_rows: Tensor, rows: Tensor) -> None:
    """Add d_rows [T, F] transposed times rows [T, H] to the weight's ``main_grad``, by its library."""
    accumulate = te_accumulate_mm_ if _by_transformer_engine(weight) else accumulate_mm_
    accumulate(matrix(weight.main_grad), d_rows.mT, rows)  # type: ignore[attr-defined]


def added_to_main_grad(weight: Tensor) -> Tensor:
    """The placeholder for autograd, after the gradient has been added to the weight's ``main_grad``."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    placeholder: Tensor = weight.spbench_placeholders.like(weight)  # type: ignore[attr-defined]
    return placeholder


def bias_gradient(d_y: Tensor, bias: Tensor) -> Tensor:
    """The gradient of the bias in the bias's shape, from d_y [..., F]."""
    return d_y.reshape(-1, d_y.shape[-1]).sum(0).view(bias.shape)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.bias = weight, bias  # the parameters, not views, as attributes are marked on them
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        d_x = input_gradient(d_y, ctx.weight) if ctx.needs_input_grad[0] else None
        d_bias = bias_gradient(d_y, ctx.bias) if ctx.needs_input_grad[2] else None
        return d_x, None if x is None else weight_gradient(d_y, x, ctx.weight), d_bias


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b [..., F] for x [..., H], a weight [..., F, H] and a bias with an element for each row. If the
    weight has an attribute ``spbench_fp8``, that recipe computes the matmuls."""
    if (recipe := getattr(weight, "spbench_fp8", None)) is not None:
        by_recipe: Tensor = recipe.project(x, weight, bias)
        return by_recipe
    if is_plain(weight):
        return multiply(x, weight, bias)
    result: Tensor = _Projection.apply(x, weight, bias)
    return result
