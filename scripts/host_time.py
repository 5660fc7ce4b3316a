"""The host's time in a step by operator, and a decoder's memory by layer, on one GPU that plays a rank.

    python scripts/host_time.py FOLDER [--scenario NAME] [--models A,B] [--seconds S] [--device cpu]

The cells are those of the scenario one_gpu_more (or NAME) that have one of the models (bert-large,
causal-transformer-1b and deepseek-v3). The script writes host_steps.csv, the seconds of a step (median of 10
after 3) until the host has launched the last kernel, and until this kernel has ended; host_operators.csv, the
calls of each operator in a step under torch.profiler, with microseconds of the host in the operator itself
and with the operators that it calls, and of the device; and layer_memory.csv, the bytes allocated after each
layer's forward, and the peak during it. A cell that fails has a line with its error. After S seconds (120) no
further cell begins.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from measuring import Add, in_a_line, parsed, parser_of, table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.emulated import BACKEND, _metered
from spbench.bench.measure.scenarios.scenario import load_scenario

WARMUP, SAMPLES, LONGEST = 3, 10, 60
FILES: Mapping[str, Sequence[str]] = {
    "host_steps": ("model", "seq_len", "host_s", "step_s", "least_s", "most_s", "error"),
    "host_operators": ("model", "seq_len", "operator", "calls", "host_self_us", "host_us", "device_us"),
    "layer_memory": ("model", "seq_len", "layer", "before_bytes", "after_bytes", "peak_bytes"),
}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step_times(step: Callable[[], Any], device: str) -> dict[str, str]:
    host, whole = [], []
    for number in range(WARMUP + SAMPLES):
        wait(device)
        begin = time.perf_counter()
        step()
        launched = time.perf_counter()
        wait(device)
        if number >= WARMUP:
            host.append(launched - begin)
            whole.append(time.perf_counter() - begin)
    numbers = {
        "host_s": statistics.median(host), "step_s": statistics.median(whole),
        "least_s": min(whole), "most_s": max(whole),
    }  # fmt: skip
    return {name: f"{x:.5g}" for name, x in numbers.items()}


def operators(step: Callable[[], Any], device: str) -> Iterator[dict[str, Any]]:
    """The lines of the operators of one step in which the host spends most time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        wait(device)
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    for event in events[:LONGEST]:
        yield {
            "operator": event.key, "calls": event.count, "host_self_us": f"{event.self_cpu_time_total:.0f}",
            "host_us": f"{event.cpu_time_total:.0f}", "device_us": f"{event.self_device_time_total:.0f}",
        }  # fmt: skip


def layer_memory(module: nn.Module, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """The bytes on the GPU before and after each layer's forward, their peak in it, and the peak behind the
    last layer."""
    seen: list[dict[str, Any]] = []
    handles = []
    blocks: Any = getattr(module, "blocks", {})
    for name in blocks:

        def before(*_: Any, name: str = name) -> None:
            torch.cuda.reset_peak_memory_stats()
            seen.append({"layer": name, "before_bytes": torch.cuda.memory_allocated()})

        def after(*_: Any) -> None:
            seen[-1]["after_bytes"] = torch.cuda.memory_allocated()
            seen[-1]["peak_bytes"] = torch.cuda.max_memory_allocated()

        handles += [blocks[name].register_forward_pre_hook(before), blocks[name].register_forward_hook(after)]
    step()
    torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    seen.append({"layer": "after the last layer", "peak_bytes": torch.cuda.max_memory_allocated()})
    return seen


def measure(cell: Cell, add: Mapping[str, Add], device: str) -> None:
    named = {"model": cell.model, "seq_len": cell.seq_len}
    try:
        with tracing.fake_mesh(cell.mesh_sizes, 0, device, BACKEND) as mesh:
            _, training, inputs = _metered(cell, mesh)

            def step() -> None:
                training.step(inputs)

            times = step_times(step, device)
            for line in operators(step, device):
                add["host_operators"](named | line)
            if device == "cuda":
                for line in layer_memory(training.module, step):
                    add["layer_memory"](named | line)
            add["host_steps"](named | times)
    except Exception as error:  # the next cell may fit
        add["host_steps"](named | {"error": in_a_line(error)})


def main() -> int:
    parser = parser_of(__doc__, 120)
    parser.add_argument("--scenario", default="one_gpu_more")
    parser.add_argument("--models", default="bert-large,causal-transformer-1b,deepseek-v3")
    if (asked := parsed(parser)) is None:
        return 2
    end = time.monotonic() + asked.seconds
    models = asked.models.split(",")
    cells = [e for of in load_scenario(asked.scenario).cells.values() for e in of if e.model in models]
    with ExitStack() as stack:
        add = {n: stack.enter_context(table(asked.folder / f"{n}.csv", of)) for n, of in FILES.items()}
        for cell in cells:
            if time.monotonic() < end:
                played = cell.model_copy(update={"engine": "emulated", "device": asked.device})
                measure(played, add, asked.device)
                if asked.device == "cuda":
                    torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
