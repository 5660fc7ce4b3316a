"""Check the linear-attention kernels on this machine's GPU, and compare their times with the card's limits.

    python scripts/check_kernels_on_gpu.py [--output results/kernels]

Writes linear_attention_<gpu>_errors.csv (the error of each tensor against float64, and the error of the
plain-torch form of the same precision) and linear_attention_<gpu>.csv (milliseconds of each operator in
bfloat16, of the plain-torch form, and of the least time that this card's own measured rates allow). Exit
code 1: an error is too large; 2: no GPU.
"""

import argparse
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.kernels import linear_attention as kernels

HEADS, BATCH = 16, 1
HEAD_SIZES = (64, 128)
#: whole, ragged, and shorter than a block
CHECKED_LENGTHS = (4096, 1000, 37)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TIMED_LENGTHS = tuple(2**n for n in range(11, 20))  # 2K to 512K
#: the largest error over the plain form's: kernels round bfloat16 operands once more before a matmul
WORST_RATIO = 3.0
WARM_UPS, REPEATS = 3, 10
OPERATORS = ("states", "output", "state_gradients", "input_gradients")

Row = dict[str, Any]


def made(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return x.to(dtype)


def arguments(
    run: Callable[[str], Any], length: int, size: int, dtype: torch.dtype, device: str
) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """(operator, its arguments, its result) in the order of a step; bfloat16 can hold all values."""
    q, k, v, d_o = (
        made(BATCH, HEADS, length, size, seed=seed, dtype=torch.bfloat16, device=device).to(dtype)
        for seed in range(4)
    )
    state = kernels.state_dtype(dtype)
    initial, d_final = (
        made(BATCH, HEADS, size, size, seed=seed, dtype=state, device=device) for seed in (4, 5)
    )
    # from no decay to a decay so strong that only a position's neighbours count
    decay = torch.linspace(0, 2, HEADS, device=device) ** 4
    given: tuple[Any, ...] = (k, v, decay, kernels.BLOCK)
    states = run("states")(*given)
    yield "states", given, states
    given = (q, k, v, decay, states, initial, kernels.BLOCK)
    yield "output", given, run("output")(*given)
    given = (q, d_o, decay, kernels.BLOCK)
    d_states = run("state_gradients")(*given)
    yield "state_gradients", given, d_states
    given = (q, k, v, d_o, decay, states, initial, d_states, d_final, kernels.BLOCK)
    yield "input_gradients", given, run("input_gradients")(*given)


def operator(name: str) -> Any:
    return getattr(kernels, f"linear_attention_{name}")


def plain(name: str) -> Any:
    return getattr(kernels, f"plain_{name}")


def tensors(run: Callable[[str], Any], *case: Any) -> dict[str, Tensor]:
    """Every result of a step's operators, by name."""
    results: dict[str, Tensor] = {}
    for name, _, result in arguments(run, *case):
        if name == "input_gradients":
            results |= dict(zip(("d_q", "d_k", "d_v"), result, strict=True))
        else:
            results[name] = result
    return results


def compile_all(device: str) -> None:
    """Compile the kernels, with a process for each head size and precision, because compiling them one after
    another takes minutes. Later runs read the compiled kernels from Triton's cache."""
    shapes = [(min(CHECKED_LENGTHS), size, dtype, device) for size in HEAD_SIZES for dtype in DTYPES]
    with ProcessPoolExecutor(min(len(shapes), os.cpu_count() or 1), get_context("spawn")) as processes:
        for done in [processes.submit(run_once, *shape) for shape in shapes]:
            done.result()


def run_once(*case: Any) -> None:
    tensors(operator, *case)


def check(device: str) -> Iterator[Row]:
    for size in HEAD_SIZES:
        for length in CHECKED_LENGTHS:
            exact = tensors(plain, length, size, torch.float64, device)
            for dtype in DTYPES:
                ours = relative_errors(exact, tensors(operator, length, size, dtype, device))
                theirs = relative_errors(exact, tensors(plain, length, size, dtype, device))
                for name, error in ours.items():
                    # states in float32 that come from half precisions are matmuls in TF32
                    floor = 5e-4 if exact[name].ndim == 5 and dtype is not torch.float32 else 1e-7
                    yield {
                        "tensor": name, "dtype": str(dtype).removeprefix("torch."), "head_size": size,
                        "length": length, "error": error, "plain_error": theirs[name],
                        "ok": error <= WORST_RATIO * max(theirs[name], floor),
                    }  # fmt: skip


def milliseconds(call: Callable[[], Any]) -> list[float] | None:
    """The milliseconds of each of some calls after warm-up; None if there is too little memory."""
    samples = []
    try:
        for i in range(WARM_UPS + REPEATS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if i >= WARM_UPS:
                samples.append(start.elapsed_time(end))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    return samples


def median(call: Callable[[], Any]) -> float:
    samples = milliseconds(call)
    return float("nan") if samples is None else statistics.median(samples)


def measured_rates(device: str) -> tuple[float, float]:
    """This card's FLOPs per second in a large bfloat16 matmul, and bytes per second in a large copy."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(2**30, device=device, dtype=torch.uint8)
    into = torch.empty_like(source)
    product, copy = median(lambda: a @ a), median(lambda: into.copy_(source))
    return 2 * 8192**3 / product * 1e3, 2 * source.nbytes / copy * 1e3


def nbytes(values: Any) -> int:
    return sum(x.nbytes for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor))


def time(device: str) -> Iterator[Row]:
    flop_rate, byte_rate = measured_rates(device)
    for size in HEAD_SIZES:
        for length in TIMED_LENGTHS:
            for name, given, result in arguments(operator, length, size, torch.bfloat16, device):
                packet = getattr(kernels.OPS, f"linear_attention_{name}")
                flops = flop_registry[packet](*given, out_val=result)
                moved = nbytes((given, result))
                del result
                samples = milliseconds(partial(operator(name), *given)) or [float("nan")]
                yield {
                    "operator": name, "head_size": size, "length": length, "heads": HEADS, "batch": BATCH,
                    "triton_ms": statistics.median(samples), "triton_min_ms": min(samples),
                    "triton_max_ms": max(samples), "repeats": len(samples),
                    "plain_ms": median(partial(plain(name), *given)),
                    "matrix_ms": flops / flop_rate * 1e3, "memory_ms": moved / byte_rate * 1e3,
                    "roofline_ms": 1e3 * max(flops / flop_rate, moved / byte_rate),
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("results/kernels"))
    output = parser.parse_args().output
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked", file=sys.stderr)
        return 2
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    output.mkdir(parents=True, exist_ok=True)
    # the plain form's own noise must be float32's, whatever the defaults
    torch.backends.cuda.matmul.allow_tf32 = False

    compile_all("cuda")
    errors = pd.DataFrame(check("cuda"))
    errors.to_csv(output / f"linear_attention_{gpu}_errors.csv", index=False)
    print(errors.to_string(index=False))
    if not errors["ok"].all():
        print(f"{(~errors['ok']).sum()} errors are too large: nothing was timed", file=sys.stderr)
        return 1
    times = pd.DataFrame(time("cuda"))
    times.to_csv(output / f"linear_attention_{gpu}.csv", index=False)
    print(times.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
