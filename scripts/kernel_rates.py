"""Measure the seconds of kernels, copies and calls on this machine's GPU, by shape.

    python scripts/kernel_rates.py FOLDER [--seconds S] [--kind KIND]

Writes kernel_rates.csv: a line for each call of kernel_calls.py, with the median, least and most seconds,
FLOP/s, byte/s, and the peak of bytes allocated, or with the error for a shape that torch refuses. After S
seconds (120) no further call begins. With KIND, such as "unaligned matmul", only calls of that kind are
measured, into a file of that name. Exit code 2: no GPU.
"""

import statistics
import sys
import time
from typing import Any

import torch
from kernel_calls import Point, points
from measuring import in_a_line, parsed, parser_of, table

#: the seconds that the calls of a point should take, and the least and the most calls of a point
POINT_S, LEAST, MOST = 0.12, 4, 60
COLUMNS = (
    *("kind", "name", "direction", "shape", "dtype", "seconds", "least_s", "most_s", "calls"),
    *("flops_per_s", "bytes_per_s", "peak_bytes", "error"),
)


def measured(point: Point) -> dict[str, Any]:
    call = point.make()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before
    calls = min(MOST, max(LEAST, round(POINT_S / max(once, 1e-6))))
    samples: list[float] = []
    if point.on_host:
        for _ in range(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
    else:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        samples = [start.elapsed_time(end) / 1e3 for start, end in events]
    seconds = statistics.median(samples)
    return {
        "seconds": f"{seconds:.4g}", "least_s": f"{min(samples):.4g}", "most_s": f"{max(samples):.4g}",
        "calls": calls,
        "flops_per_s": f"{point.flops / seconds:.4g}" if point.flops else "",
        "bytes_per_s": f"{point.nbytes / seconds:.4g}" if point.nbytes else "",
        "peak_bytes": peak,
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, 120, devices=("cuda",))
    parser.add_argument("--kind", default="", help="such as 'unaligned matmul'")
    if (arguments := parsed(parser)) is None:
        return 2
    end, left_out = time.monotonic() + arguments.seconds, 0
    name = f"{arguments.kind.replace(' ', '_') or 'kernel_rates'}.csv"
    with table(arguments.folder / name, COLUMNS) as add:
        for point in (p for p in points() if arguments.kind in ("", p.kind)):
            if time.monotonic() > end:
                left_out += 1
                continue
            row = {name: getattr(point, name) for name in COLUMNS[:5] if name != "seconds"}
            try:
                row |= measured(point)
            except Exception as error:  # this torch or card does not take that shape
                row["error"] = in_a_line(error)
            torch.cuda.empty_cache()
            add(row)
    if left_out:
        print(f"{left_out} shapes were left out after {arguments.seconds:g} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
