"""The calls that ``kernel_rates.py`` times: attention, matmuls, grouped matmuls of experts, kernels that move
bytes, copies to and from the host, and calls that are timed on the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spbench.impls.kernels.fp8_casts import E4M3, WHOLE, fp8_cast

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Point:
    """One call to time; ``make`` makes the call's tensors and returns the call."""

    kind: str
    name: str
    shape: str
    make: Callable[[], Callable[[], Any]]
    direction: str = "forward"
    dtype: str = "bf16"
    flops: float = 0.0
    nbytes: float = 0.0
    #: whether the call is timed by the host's clock, without waiting for the device
    on_host: bool = field(default=False)


def normal(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


def prepared(call: Callable[..., Any], *makers: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """A function that runs the makers just before the call is timed, and returns ``call`` with their
    values."""
    return lambda: partial(call, *(make() for make in makers))


KERNELS = {
    "flash_attention_2": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: calls of attention: heads, heads of keys, head size, head size of values, length, whether causal
ATTENTIONS = (
    *((32, 8, 128, 128, n, True) for n in (1024, 4096, 16384, 65536)),
    *((16, 16, 64, 64, n, False) for n in (512, 2048, 8192)),
    *((16, 16, 64, 64, n, True) for n in (2048, 8192)),
    *((16, 16, 128, 128, n, True) for n in (4096, 16384)),
    *((16, 16, 128, 128, n, False) for n in (4096, 16384)),
    *((16, 16, 192, 128, n, True) for n in (4096, 16384)),
    *((4, 1, 128, 128, n, True) for n in (8192, 65536)),
    *((64, 8, 64, 64, n, True) for n in (8192,)),
)


def attention_call(
    backend: SDPBackend, grad: bool, causal: bool, *shapes: tuple[int, ...]
) -> Callable[[], Any]:
    """A function that runs attention on q, k and v, with ``grad`` also its backward. ``shapes``: [B, L, Z, A]
    of q, k, v and the gradient of the output, the order in which layers have them in memory."""
    q, k, v, d_o = (normal(*shape).transpose(1, 2).detach().requires_grad_(grad) for shape in shapes)

    def call() -> None:
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] < q.shape[1])
        if grad:
            torch.autograd.grad(o, (q, k, v), d_o)

    return call


def attention() -> Iterator[Point]:
    for z, g, a, of_values, length, causal in ATTENTIONS:
        b = max(1, 8192 // length)
        pairs = length**2 / (2 if causal else 1)
        forward = 2 * b * z * pairs * (a + of_values)
        both = forward + 2 * b * z * pairs * (3 * a + 2 * of_values)
        shape = f"B{b} Z{z} G{g} A{a}/{of_values} L{length} {'causal' if causal else 'whole'}"
        shapes = ((b, length, z, a), (b, length, g, a), (b, length, g, of_values), (b, length, z, of_values))
        for kernel, backend in KERNELS.items():
            for direction, flops in (("forward", forward), ("forward and backward", both)):
                make = partial(attention_call, backend, direction != "forward", causal, *shapes)
                yield Point("attention", kernel, shape, make, direction, flops=flops)


#: input and output features of linear layers, by model
LAYERS = {
    "llama3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    "llama3-70b tp8": ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192)),
    "bert-large": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "tnl-1b": ((2048, 2048), (2048, 8192)),
}


def scaled_matmul(recipe: str, m: int, k: int, n: int) -> Callable[[], Any]:
    """The matmul [m, k] x [k, n] in eight bits, with scales of whole tensors, or of rows and columns."""
    a, b = normal(m, k).to(E4M3), normal(n, k).to(E4M3)
    shapes: tuple[tuple[int, ...], ...] = ((), ()) if recipe == "tensorwise" else ((m, 1), (1, n))
    scales = [torch.ones(s, device="cuda") for s in shapes]
    return lambda: torch._scaled_mm(a, b.mT, *scales, out_dtype=BF16, use_fast_accum=True)


def matmuls() -> Iterator[Point]:
    for model, layers in LAYERS.items():
        for m, (k, n) in product((1024, 8192, 32768), layers):
            if m * n > 2**31:
                continue
            flops, shape = 2.0 * m * k * n, f"{model} [{m}, {k}] x [{k}, {n}]"
            x, w, d_y = partial(normal, m, k), partial(normal, n, k), partial(normal, m, n)
            yield Point("matmul", "cublas", shape, prepared(F.linear, x, w), flops=flops)
            of_weights = prepared(lambda d_y, x: d_y.mT @ x, d_y, x)
            yield Point("matmul", "cublas", shape, of_weights, "gradient of weights", flops=flops)
            if model == "llama3-8b" and n <= 2**16:
                for recipe in ("tensorwise", "rowwise"):
                    scaled = partial(scaled_matmul, recipe, m, k, n)
                    yield Point("matmul", f"scaled_mm {recipe}", shape, scaled, dtype="fp8", flops=flops)


#: rows, input and output features; some are no multiple of 8, so that rows are not aligned to 16 bytes
UNALIGNED = (
    *((8192, 4096, n) for n in (100352, 100278, 100280, 100276, 100277)),
    *((8192, 4096, n) for n in (14336, 14332, 14330, 14329)),
    *((8192, k, 4096) for k in (14332, 14330, 14329)),
    *((n, 4096, 4096) for n in (8192, 8188, 8190, 8191)),
    *((8192, 1600, n) for n in (50304, 50257)),
)


def unaligned() -> Iterator[Point]:
    for m, k, n in UNALIGNED:
        x, w, d_y = partial(normal, m, k), partial(normal, n, k), partial(normal, m, n)
        calls = {
            "forward": prepared(F.linear, x, w),
            "gradient of inputs": prepared(torch.matmul, d_y, w),
            "gradient of weights": prepared(lambda d_y, x: d_y.mT @ x, d_y, x),
        }
        for direction, make in calls.items():
            shape = f"[{m}, {k}] x [{k}, {n}]"
            yield Point("unaligned matmul", "cublas", shape, make, direction, flops=2.0 * m * k * n)


#: by model: experts of a rank, hidden size, inner size of one expert
EXPERTS = {
    "mixtral-8x7b": (8, 4096, 14336),
    "qwen3-30b-a3b": (16, 2048, 768),
    "deepseek-v3": (8, 7168, 2048),
    "deepseek-v2-lite": (8, 2048, 1408),
}


def grouped() -> Iterator[Point]:
    for (model, (experts, h, f)), rows in product(EXPERTS.items(), (256, 1024, 4096)):
        total = rows * experts
        flops, shape = 2.0 * total * h * f, f"{model} {experts} x [{rows}, {h}] x [{h}, {f}]"
        x, w, d_y = partial(normal, total, h), partial(normal, experts, f, h), partial(normal, total, f)
        ends = partial(torch.arange, rows, total + 1, rows, device="cuda", dtype=torch.int32)
        calls = {
            "forward": prepared(lambda x, w, ends: torch._grouped_mm(x, w.mT, offs=ends), x, w, ends),
            "gradient of inputs": prepared(
                lambda d_y, w, ends: torch._grouped_mm(d_y, w, offs=ends), d_y, w, ends
            ),
            "gradient of weights": prepared(
                lambda d_y, x, ends: torch._grouped_mm(d_y.mT, x, offs=ends), d_y, x, ends
            ),
        }
        for direction, make in calls.items():
            yield Point("grouped matmul", "grouped_mm", shape, make, direction, flops=flops)
        one_by_one = prepared(
            lambda x, w: [F.linear(*of_expert) for of_expert in zip(x.chunk(len(w)), w, strict=True)], x, w
        )
        yield Point("grouped matmul", "one by one", shape, one_by_one, flops=flops)


def adam(implementation: str) -> Callable[[], Any]:
    weights = [nn.Parameter(normal(4096, 4096, dtype=torch.float32)) for _ in range(24)]
    for w in weights:
        w.grad = torch.randn_like(w)
    return torch.optim.AdamW(weights, lr=1e-4, **{implementation: True}).step


def moves() -> Iterator[Point]:
    """Kernels that move bytes, on tensors [8192, 4096] in bfloat16 unless their shape or type is another."""
    n, h = 8192, 4096
    x, weight, rows = partial(normal, n, h), partial(normal, h), partial(torch.randperm, n, device="cuda")
    #: by name: how many tensors [8192, 4096] are read or written, and the call
    calls: dict[str, tuple[float, Callable[[], Callable[[], Any]]]] = {
        "add": (3, prepared(torch.add, x, x)),
        "copy": (2, prepared(torch.clone, x)),
        "copy of a transpose": (2, prepared(lambda x: x.mT.contiguous(), x)),
        "to float32": (3, prepared(Tensor.float, x)),
        "silu": (2, prepared(F.silu, x)),
        "gelu": (2, prepared(F.gelu, x)),
        "rms_norm": (2, prepared(lambda x, w: F.rms_norm(x, (h,), w), x, weight)),
        "layer_norm": (2, prepared(lambda x, w: F.layer_norm(x, (h,), w), x, weight)),
        "softmax": (2, prepared(lambda x: x.softmax(-1), x)),
        "dropout": (2.5, prepared(lambda x: F.dropout(x, 0.1), x)),
        "index_select of rows": (2, prepared(lambda x, i: x[i], x, rows)),
        "index_add of rows": (3, prepared(lambda x, y, i: x.index_add_(0, i, y), x, x, rows)),
        "sum": (1, prepared(torch.sum, x)),
    }
    # a tensor in eight bits counts as half a tensor in bfloat16
    for name, tile in (("one scale", WHOLE), ("scales by rows", (1, 0))):
        for side in ("", ", transposed"):
            cast = partial(fp8_cast, dtype=E4M3, tile=tile, scales=None, transposed=bool(side))
            made = prepared(lambda x, cast=cast: cast(x, None), x)
            # with one scale the tensor is read once more before, for its largest magnitude
            calls[f"cast to fp8, {name}{side}"] = (1.5 if tile != WHOLE else 2.5, made)
    for name, (times, make) in calls.items():
        yield Point("bytes", name, f"[{n}, {h}]", make, nbytes=times * 2 * n * h)
    labels = partial(torch.randint, 0, 128256, (4096,), device="cuda")
    loss = prepared(F.cross_entropy, partial(normal, 4096, 128256, dtype=torch.float32), labels)
    yield Point("bytes", "cross_entropy", "[4096, 128256]", loss, dtype="fp32", nbytes=12.0 * 4096 * 128256)
    for kind in ("fused", "foreach"):
        name, nbytes = f"AdamW {kind}", 28.0 * 24 * 4096**2
        yield Point("bytes", name, "24 x [4096, 4096]", partial(adam, kind), dtype="fp32", nbytes=nbytes)
    for count, (name, pinned) in product((2**20, 2**24, 2**28), (("pinned", True), ("pageable", False))):
        of_host = partial(torch.ones, count, dtype=torch.uint8, pin_memory=pinned)
        of_device = partial(torch.ones, count, dtype=torch.uint8, device="cuda")
        for direction, source, target in (
            ("to the device", of_host, of_device),
            ("to the host", of_device, of_host),
        ):
            copy = prepared(partial(Tensor.copy_, non_blocking=True), target, source)
            yield Point("host copy", name, f"{count} B", copy, direction, "uint8", nbytes=count)


#: repetitions of a call that the device runs faster than the host launches it
TIMES = 100


def repeated(call: Callable[..., Any], *given: Any) -> None:
    for _ in range(TIMES):
        call(*given)


def chain(x: Tensor, length: int) -> None:
    """Run forward and backward of a chain of ``length`` additions."""
    y = x
    for _ in range(length):
        y = y + 1
    torch.autograd.grad(y, x, torch.ones_like(y))


def host() -> Iterator[Point]:
    """Calls whose seconds are of the host: operators, views, modules, and chains of additions."""
    x, recorded = partial(normal, 64, 64), partial(normal, 64, 64, grad=True)
    linear = partial(nn.Linear, 64, 64, bias=False, device="cuda", dtype=BF16)
    calls: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]] = {
        "add": (lambda x: x + x, (x,)),
        "matmul": (lambda x: x @ x, (x,)),
        "view": (lambda x: x.view(32, 128), (x,)),
        "add, recorded by autograd": (lambda x: x + x, (recorded,)),
        "add, forward and backward": (lambda x: torch.autograd.grad((x + 1).sum(), x), (recorded,)),
        "linear": (F.linear, (x, lambda: linear().weight)),
        "module of a linear": (lambda x, module: module(x), (x, linear)),
        "new tensor": (lambda x: x.new_empty(64, 64), (x,)),
    }
    for name, (call, makers) in calls.items():
        yield Point("host", name, f"{TIMES} calls", prepared(partial(repeated, call), *makers), on_host=True)
    for length in (10, 110):
        name = f"chain of {length} additions, forward and backward"
        yield Point("host", name, "1 call", prepared(partial(chain, length=length), recorded), on_host=True)


def points() -> Iterator[Point]:
    """All calls to time; kinds of call that take less time come first."""
    for kind in (host, moves, unaligned, grouped, attention, matmuls):
        yield from kind()
