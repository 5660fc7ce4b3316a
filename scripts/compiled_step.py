"""Compare torch.compile's steps of Llama-3-8B on one GPU with the project's ``model_options.fusions``.

    python scripts/compiled_step.py FOLDER [--seconds S] [--variants V,...] [--device cpu] [--set SIZE=N ...]
    python scripts/compiled_step.py FOLDER --predict

A step is forward and backward of four layers, 8,192 tokens, in bfloat16, with separate projections as in
torchtitan; it has no optimizer, and adds to existing gradients. Variants: ``eager``, in which each operator
and each RMS norm is a kernel of torch; ``plain_norm``, in which norms are several operators; ``fused``, with
``fusions: [swiglu, rope]``, which models a compiled layer: it keeps the same tensors, but each of its
operators is several kernels of torch; ``compiled``, in which Inductor compiles each layer with
``fullgraph=True`` (compiled_layers.py). Each variant runs without recomputation and with ``recompute: full``.

The script writes compiled_step.csv, a line for each variant: seconds (median of 10 after 3), ``kernels`` of a
step with their seconds, and its copies and fills, by torch.profiler (on a CPU: calls of operators); bytes
that a layer keeps after forward (of four layers less those of two, halved); peak bytes allocated; seconds of
compiling (the first step less the median); the loss, by which variants can be compared; an error, after the
numbers before it. compiled_kernels.csv has each variant's 40 longest kernels by name. After S seconds (90) no
further variant begins. ``--predict`` writes compiled_predicted.csv, the same numbers by virtual ranks of
dgx-h100 and h200-sxm, whose peak is without the optimizer. Exit code 2: no GPU.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compiled_layers import MODEL, RECOMPUTE, VARIANTS, Step, options_of
from measuring import in_a_line, parsed, parser_of, table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

SEQ_LEN, LAYERS, FEWER = 8192, 4, 2
WARMUP, SAMPLES, LONGEST = 3, 10, 40
CLUSTERS = ("dgx-h100", "h200-sxm")
MEASURED = (
    *("variant", "recompute", "seconds", "least_s", "most_s", "kernels", "kernels_s", "copies"),
    *("layer_kept_bytes", "peak_bytes", "compile_s", "loss", "error"),
)
BY_NAME = ("variant", "recompute", "kernel", "calls", "seconds")
PREDICTED = (
    *("cluster", "variant", "recompute", "seconds", "forward_s", "backward_s", "kernels"),
    *("layer_kept_bytes", "peak_bytes", "peak_phase", "cell"),
)
#: by device, the categories of a trace's events that count as kernels, and the ones that count as copies
CATEGORIES = {"cuda": ({"kernel"}, {"gpu_memcpy", "gpu_memset"}), "cpu": ({"cpu_op"}, set[str]())}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clocked(call: Callable[[], Any], device: str) -> float:
    """The seconds of a call, by events of CUDA on its stream, or by the clock on a CPU."""
    wait(device)
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def kernels_of(step: Step, device: str) -> tuple[Counter[str], dict[str, float], int]:
    """The calls and the seconds of one step's kernels by name, and the number of its copies and fills."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiled:
        step()
        wait(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    kernels, copies = CATEGORIES[device]
    calls: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in kernels:
            calls[event["name"]] += 1
            seconds[event["name"]] += event["dur"] / 1e6
    return calls, seconds, sum(event.get("cat") in copies for event in events)


def kept_after_forward(step: Step) -> int:
    """The bytes that a step keeps on the GPU from forward to backward."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = step.forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept


def measure(row: dict[str, Any], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Fill ``row``, the line of a variant, number by number; returns the lines of its longest kernels."""
    which = row["variant"], row["recompute"]
    step, device = Step(*which, LAYERS, asked), asked.device
    begin = time.perf_counter()
    row["loss"] = f"{step().item():.6g}"
    first = time.perf_counter() - begin
    for _ in range(WARMUP - 1):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    samples = [clocked(step, device) for _ in range(SAMPLES)]
    median = statistics.median(samples)
    row |= {"seconds": f"{median:.4g}", "least_s": f"{min(samples):.4g}", "most_s": f"{max(samples):.4g}"}
    row["compile_s"] = f"{max(0.0, first - median):.3g}" if row["variant"] == "compiled" else ""
    if device == "cuda":
        more = kept_after_forward(step)
        fewer = Step(*which, FEWER, asked)
        fewer()  # a first step makes the tensors that are made only once
        row["layer_kept_bytes"] = (more - kept_after_forward(fewer)) // (LAYERS - FEWER)
        del fewer
    calls, seconds, row["copies"] = kernels_of(step, device)
    row |= {"kernels": calls.total(), "kernels_s": f"{sum(seconds.values()):.4g}"}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST]
    return [{"kernel": n[:200], "calls": calls[n], "seconds": f"{seconds[n]:.4g}"} for n in longest]


def measure_all(arguments: argparse.Namespace) -> None:
    """Write both files, each line as soon as it is measured; the line of a failed variant has the error."""
    device, end = arguments.device, time.monotonic() + arguments.seconds
    attention = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext()
    with (
        table(arguments.folder / "compiled_step.csv", MEASURED) as add,
        table(arguments.folder / "compiled_kernels.csv", BY_NAME) as add_kernel,
        attention,
    ):
        for recompute in RECOMPUTE:
            for variant in arguments.variants:
                which = {"variant": variant, "recompute": recompute}
                if time.monotonic() > end:
                    add(which | {"error": f"not begun within {arguments.seconds:g} s"})
                    continue
                print(f"{variant}, recompute: {recompute}", file=sys.stderr)
                row: dict[str, Any] = {**which}
                try:
                    for each in measure(row, arguments):
                        add_kernel(which | each)
                except Exception as error:  # the other variants are worth having
                    row["error"] = in_a_line(error, 300)
                add(row)
                gc.collect()
                torch.cuda.empty_cache()


def predicted(cluster: str, variant: str, recompute: str) -> dict[str, Any]:
    """The line of compiled_predicted.csv for a variant on a cluster, by virtual ranks."""
    from spbench.bench.cell import Cell
    from spbench.bench.measure.engines.virtual import trace_classes

    kept, row = [], {}
    for layers in (FEWER, LAYERS):
        options = {"layers": layers, **options_of(variant, recompute)}
        cell = Cell(
            model=MODEL, strategy="single", batch=1, seq_len=SEQ_LEN, precision="bf16", cluster=cluster,
            model_options=options,
        )  # fmt: skip
        traces = trace_classes(cell, events=True)
        memory: Any = traces.memory_measurement()
        last = memory.by_class[-1]
        kept.append(last["phase_ends"]["forward"]["allocated"] - last["allocated_bytes"])
        if layers < LAYERS:
            continue
        by_phase: dict[str, list[float]] = defaultdict(list)
        for event in traces.simulator()().events(0):
            by_phase[event.phase].append(event.duration_s)
        forward, backward = (by_phase[name] for name in ("forward", "backward"))
        row = {
            "seconds": f"{sum(forward) + sum(backward):.4g}",
            "forward_s": f"{sum(forward):.4g}", "backward_s": f"{sum(backward):.4g}",
            "kernels": len(forward) + len(backward),
            "peak_bytes": memory.peak_memory_bytes - memory.peak_held["optimizer_state"],
            "peak_phase": memory.peak_phase, "cell": cell.key.rpartition("/")[2],
        }  # fmt: skip
    return row | {"layer_kept_bytes": (kept[1] - kept[0]) // (LAYERS - FEWER)}


def predict_all(folder: Path) -> None:
    with table(folder / "compiled_predicted.csv", PREDICTED) as add:
        for cluster in CLUSTERS:
            for recompute in RECOMPUTE:
                for variant in VARIANTS:
                    if variant != "compiled":  # fused models it
                        which = {"cluster": cluster, "variant": variant, "recompute": recompute}
                        add(which | predicted(cluster, variant, recompute))


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(VARIANTS)}")
    return names


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no SIZE=N, such as hidden=64")
    return name, int(number)


def main() -> int:
    parser = parser_of(__doc__, 90)
    parser.add_argument("--variants", type=_variants, default=[*VARIANTS])
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--set", type=_size, action="append", default=[], dest="sizes", help="of the model")
    parser.add_argument("--predict", action="store_true")
    if (arguments := parsed(parser)) is None:
        return 2
    arguments.sizes = dict(arguments.sizes)
    if arguments.predict:
        predict_all(arguments.folder)
    else:
        measure_all(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
