"""What torch.compile makes of a step of Llama-3-8B on one GPU, beside what ``model_options.fusions`` says.

    python scripts/compiled_step.py FOLDER [--seconds S] [--variants V,...] [--device cpu] [--set SIZE=N ...]
    python scripts/compiled_step.py FOLDER --predict

Four layers, 8,192 tokens, bfloat16, separate projections, as torchtitan has them; forward and backward
without an optimizer, into gradients that are there. Variants: ``eager``, each operator a kernel of torch, and
each RMS norm; ``plain_norm``, norms by operators too; ``fused``, ``fusions: [swiglu, rope]``, which stands
for a compiled layer: it keeps what one does, but its operators are several of torch's kernels each, and take
their time; ``compiled``, each layer by Inductor with ``fullgraph=True``, of the same weights
(compiled_layers.py). Each without recomputation and with ``recompute: full``.

Writes compiled_step.csv, a line a variant: seconds (median of 10 after 3), ``kernels`` of a step with their
seconds, and its copies and fills, by torch.profiler (on a CPU: calls of operators); bytes that a layer keeps
after forward (of four layers less those of two, halved); peak bytes allocated; seconds of compiling (the
first step less the median); the loss, by which variants can be compared; an error, with what was there before
it. compiled_kernels.csv has each variant's 40 longest kernels by name. After S seconds (90) no further
variant begins. ``--predict`` writes compiled_predicted.csv: the same by virtual ranks of dgx-h100 and
h200-sxm, whose peak is without the optimizer. Exit code 2: no GPU.
"""

from __future__ import annotations

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
#: of a trace's events, by device: what counts as a kernel, and what as a copy
CATEGORIES = {"cuda": ({"kernel"}, {"gpu_memcpy", "gpu_memset"}), "cpu": ({"cpu_op"}, set[str]())}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clocked(call: Callable[[], Any], device: str) -> float:
    """Seconds of a call: by events of CUDA on its stream, on a CPU by the clock."""
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
    """Calls and seconds of one step's kernels by name, and the number of its copies and fills."""
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
    """Bytes that a forward has left allocated on the GPU."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = step.forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return kept


def measure(row: dict[str, Any], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Fill the line of a variant, number by number; returns those of its longest kernels."""
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
        fewer()  # what is made once is there after it
        row["layer_kept_bytes"] = (more - kept_after_forward(fewer)) // (LAYERS - FEWER)
        del fewer
    calls, seconds, row["copies"] = kernels_of(step, device)
    row |= {"kernels": calls.total(), "kernels_s": f"{sum(seconds.values()):.4g}"}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST]
    return [{"kernel": n[:200], "calls": calls[n], "seconds": f"{seconds[n]:.4g}"} for n in longest]


def measure_all(arguments: argparse.Namespace) -> None:
    """Write both files, a line when it is there; of a variant that fails, its error."""
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
    """What virtual ranks say of a variant."""
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
                    if variant != "compiled":  # fused stands for it
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
