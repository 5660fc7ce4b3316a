"""The calls that ``kernel_rates.py`` times: attention, matmuls, grouped matmuls of experts, kernels that move
bytes, copies to and from the host, and calls of which the host's part is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Point:
    """One call to time; ``make`` returns it, with its tensors."""

    kind: str
    name: str
    shape: str
    make: Callable[[], Callable[[], Any]]
    direction: str = "forward"
    dtype: str = "bf16"
    flops: float = 0.0
    nbytes: float = 0.0
    #: timed by the host's clock, without waiting for the device
    on_host: bool = field(default=False)


def normal(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_(grad)


KERNELS = {"flash_attention_2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
#: heads, heads of keys, head size, that of values, length, whether causal
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


def attention() -> Iterator[Point]:
    for heads, groups, size, values, length, causal in ATTENTIONS:
        batch = max(1, 8192 // length)
        pairs = length**2 / (2 if causal else 1)
        forward = 2 * batch * heads * pairs * (size + values)
        backward = 2 * batch * heads * pairs * (3 * size + 2 * values)
        shape = f"B{batch} Z{heads} G{groups} A{size}/{values} L{length} {'causal' if causal else 'whole'}"
        for kernel, backend in KERNELS.items():
            for direction, flops in (("forward", forward), ("forward and backward", forward + backward)):

                def make(
                    backend: SDPBackend = backend,
                    grad: bool = direction != "forward",
                    of: Any = (batch, heads, groups, size, values, length, causal),
                ) -> Callable[[], Any]:
                    b, z, g, a, v_size, n, is_causal = of
                    # [B, L, Z, A] in memory, as layers have them
                    q, k, v = (
                        normal(b, n, h, d).transpose(1, 2).detach().requires_grad_(grad)
                        for h, d in ((z, a), (g, a), (g, v_size))
                    )
                    d_o = normal(b, n, z, v_size).transpose(1, 2)

                    def call() -> None:
                        with sdpa_kernel(backend):
                            o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=g < z)
                        if grad:
                            torch.autograd.grad(o, (q, k, v), d_o)

                    return call

                yield Point("attention", kernel, shape, make, direction, flops=flops)


#: features in and out of linear layers, by model
LAYERS = {
    "llama3-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)),
    "llama3-70b tp8": ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192)),
    "bert-large": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "tnl-1b": ((2048, 2048), (2048, 8192)),
}


def matmuls() -> Iterator[Point]:
    for model, layers in LAYERS.items():
        for rows in (1024, 8192, 32768):
            for h, f in layers:
                if rows * f > 2**31:
                    continue
                flops, shape = 2.0 * rows * h * f, f"{model} [{rows}, {h}] x [{h}, {f}]"

                def forward(m: int = rows, k: int = h, n: int = f) -> Callable[[], Any]:
                    return partial(F.linear, normal(m, k), normal(n, k))

                def of_weights(m: int = rows, k: int = h, n: int = f) -> Callable[[], Any]:
                    return partial(torch.matmul, normal(m, n).mT, normal(m, k))

                yield Point("matmul", "cublas", shape, forward, flops=flops)
                yield Point("matmul", "cublas", shape, of_weights, "gradient of weights", flops=flops)
                if model != "llama3-8b" or f > 2**16:
                    continue
                for recipe in ("tensorwise", "rowwise"):

                    def scaled(m: int = rows, k: int = h, n: int = f, by: str = recipe) -> Callable[[], Any]:
                        a, b = normal(m, k).to(E4M3), normal(n, k).to(E4M3)
                        shapes = ((), ()) if by == "tensorwise" else ((m, 1), (1, n))
                        scales = [torch.ones(s, device="cuda") for s in shapes]
                        return lambda: torch._scaled_mm(a, b.mT, *scales, out_dtype=BF16, use_fast_accum=True)

                    yield Point("matmul", f"scaled_mm {recipe}", shape, scaled, dtype="fp8", flops=flops)


#: experts of a rank, hidden, inner of one expert
EXPERTS = {
    "mixtral-8x7b": (8, 4096, 14336),
    "qwen3-30b-a3b": (16, 2048, 768),
    "deepseek-v3": (8, 7168, 2048),
    "deepseek-v2-lite": (8, 2048, 1408),
}


def grouped() -> Iterator[Point]:
    for model, (experts, hidden, inner) in EXPERTS.items():
        for rows in (256, 1024, 4096):
            total = rows * experts
            flops, shape = (
                2.0 * total * hidden * inner,
                f"{model} {experts} x [{rows}, {hidden}] x [{hidden}, {inner}]",
            )

            def ends(n: int = experts, each: int = rows) -> Tensor:
                return torch.arange(each, n * each + 1, each, device="cuda", dtype=torch.int32)

            def forward(
                t: int = total, n: int = experts, h: int = hidden, f: int = inner, ends: Any = ends
            ) -> Callable[[], Any]:
                x, w, offsets = normal(t, h), normal(n, f, h), ends()
                return lambda: torch._grouped_mm(x, w.mT, offs=offsets)

            def backward(
                t: int = total, n: int = experts, h: int = hidden, f: int = inner, ends: Any = ends
            ) -> Callable[[], Any]:
                d_y, w, offsets = normal(t, f), normal(n, f, h), ends()
                return lambda: torch._grouped_mm(d_y, w, offs=offsets)

            def of_weights(
                t: int = total, h: int = hidden, f: int = inner, ends: Any = ends
            ) -> Callable[[], Any]:
                d_y, x, offsets = normal(t, f), normal(t, h), ends()
                return lambda: torch._grouped_mm(d_y.mT, x, offs=offsets)

            def one_by_one(
                n: int = experts, each: int = rows, h: int = hidden, f: int = inner
            ) -> Callable[[], Any]:
                xs, ws = [normal(each, h) for _ in range(n)], [normal(f, h) for _ in range(n)]
                return lambda: [F.linear(x, w) for x, w in zip(xs, ws, strict=True)]

            yield Point("grouped matmul", "grouped_mm", shape, forward, flops=flops)
            yield Point("grouped matmul", "grouped_mm", shape, backward, "gradient of inputs", flops=flops)
            yield Point("grouped matmul", "grouped_mm", shape, of_weights, "gradient of weights", flops=flops)
            yield Point("grouped matmul", "one by one", shape, one_by_one, flops=flops)


def moves() -> Iterator[Point]:
    """Kernels that move bytes, of [8192, 4096] in bfloat16 where nothing else is said."""
    n, h = 8192, 4096
    one = 2.0 * n * h
    x_of = partial(normal, n, h)

    def of(call: Callable[..., Any], *given: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
        return lambda: partial(call, *(make() for make in given))

    weight = partial(normal, h)
    yield Point("bytes", "add", f"[{n}, {h}]", of(torch.add, x_of, x_of), nbytes=3 * one)
    yield Point("bytes", "copy", f"[{n}, {h}]", of(torch.clone, x_of), nbytes=2 * one)
    yield Point(
        "bytes", "copy of a transpose", f"[{n}, {h}]", of(lambda x: x.mT.contiguous(), x_of), nbytes=2 * one
    )
    yield Point("bytes", "to float32", f"[{n}, {h}]", of(lambda x: x.float(), x_of), nbytes=3 * one)
    yield Point("bytes", "silu", f"[{n}, {h}]", of(F.silu, x_of), nbytes=2 * one)
    yield Point("bytes", "gelu", f"[{n}, {h}]", of(F.gelu, x_of), nbytes=2 * one)
    yield Point(
        "bytes",
        "rms_norm",
        f"[{n}, {h}]",
        of(lambda x, w: F.rms_norm(x, (h,), w), x_of, weight),
        nbytes=2 * one,
    )
    yield Point(
        "bytes",
        "layer_norm",
        f"[{n}, {h}]",
        of(lambda x, w: F.layer_norm(x, (h,), w), x_of, weight),
        nbytes=2 * one,
    )
    yield Point("bytes", "softmax", f"[{n}, {h}]", of(lambda x: x.softmax(-1), x_of), nbytes=2 * one)
    yield Point("bytes", "dropout", f"[{n}, {h}]", of(lambda x: F.dropout(x, 0.1), x_of), nbytes=2.5 * one)
    yield Point(
        "bytes",
        "index_select of rows",
        f"[{n}, {h}]",
        of(lambda x, i: x[i], x_of, lambda: torch.randperm(n, device="cuda")),
        nbytes=2 * one,
    )
    yield Point(
        "bytes",
        "index_add of rows",
        f"[{n}, {h}]",
        of(lambda x, y, i: x.index_add_(0, i, y), x_of, x_of, lambda: torch.randperm(n, device="cuda")),
        nbytes=3 * one,
    )
    yield Point("bytes", "sum", f"[{n}, {h}]", of(torch.sum, x_of), nbytes=one)
    logits = partial(normal, 4096, 128256, dtype=torch.float32)
    labels = partial(torch.randint, 0, 128256, (4096,), device="cuda")
    yield Point(
        "bytes",
        "cross_entropy",
        "[4096, 128256]",
        of(F.cross_entropy, logits, labels),
        dtype="fp32",
        nbytes=12.0 * 4096 * 128256,
    )
    for implementation in ("fused", "foreach"):

        def adam(kind: str = implementation) -> Callable[[], Any]:
            weights = [nn.Parameter(normal(4096, 4096, dtype=torch.float32)) for _ in range(24)]
            for w in weights:
                w.grad = torch.randn_like(w)
            return torch.optim.AdamW(weights, lr=1e-4, **{kind: True}).step

        yield Point(
            "bytes",
            f"AdamW {implementation}",
            "24 x [4096, 4096]",
            adam,
            dtype="fp32",
            nbytes=28.0 * 24 * 4096**2,
        )
    for nbytes in (2**20, 2**24, 2**28):
        for name, pinned in (("pinned", True), ("pageable", False)):

            def to_device(count: int = nbytes, pin: bool = pinned) -> Callable[[], Any]:
                host = torch.ones(count, dtype=torch.uint8, pin_memory=pin)
                device = torch.empty(count, dtype=torch.uint8, device="cuda")
                return lambda: device.copy_(host, non_blocking=True)

            def to_host(count: int = nbytes, pin: bool = pinned) -> Callable[[], Any]:
                host = torch.ones(count, dtype=torch.uint8, pin_memory=pin)
                device = torch.ones(count, dtype=torch.uint8, device="cuda")
                return lambda: host.copy_(device, non_blocking=True)

            yield Point("host copy", name, f"{nbytes} B", to_device, "to the device", "uint8", nbytes=nbytes)
            yield Point("host copy", name, f"{nbytes} B", to_host, "to the host", "uint8", nbytes=nbytes)


def host() -> Iterator[Point]:
    """Seconds of the host alone: 100 calls that the device does faster than the host launches them."""
    times = 100

    def repeat(call: Callable[[], Any]) -> Callable[[], Any]:
        def calls() -> None:
            for _ in range(times):
                call()

        return calls

    def small(call: Callable[..., Any], grad: bool = False) -> Callable[[], Callable[[], Any]]:
        return lambda: repeat(partial(call, normal(64, 64, grad=grad)))

    linear = partial(nn.Linear, 64, 64, bias=False, device="cuda", dtype=BF16)
    yield Point("host", "add", "100 calls", small(lambda x: x + x), on_host=True)
    yield Point("host", "matmul", "100 calls", small(lambda x: x @ x), on_host=True)
    yield Point("host", "view", "100 calls", small(lambda x: x.view(32, 128)), on_host=True)
    yield Point(
        "host", "add, recorded by autograd", "100 calls", small(lambda x: x + x, grad=True), on_host=True
    )
    yield Point(
        "host",
        "add, forward and backward",
        "100 calls",
        small(lambda x: torch.autograd.grad((x + 1).sum(), x), grad=True),
        on_host=True,
    )
    yield Point(
        "host",
        "linear",
        "100 calls",
        lambda: (lambda m: repeat(partial(F.linear, normal(64, 64), m.weight)))(linear()),
        on_host=True,
    )
    yield Point(
        "host",
        "module of a linear",
        "100 calls",
        lambda: (lambda m: repeat(partial(m, normal(64, 64))))(linear()),
        on_host=True,
    )
    yield Point("host", "new tensor", "100 calls", small(lambda x: x.new_empty(64, 64)), on_host=True)

    def chain(length: int) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = normal(64, 64, grad=True)

            def backward() -> None:
                y = x
                for _ in range(length):
                    y = y + 1
                torch.autograd.grad(y, x, torch.ones_like(y))

            return backward

        return make

    for length in (10, 110):
        yield Point(
            "host",
            f"chain of {length} additions, forward and backward",
            "1 call",
            chain(length),
            on_host=True,
        )


def points() -> Iterator[Point]:
    """All of them, those first that take least time."""
    for kind in (host, moves, grouped, attention, matmuls):
        yield from kind()
