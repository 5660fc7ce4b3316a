"""Logs as benchmarks and profilers write them, of machines whose rates are known."""

from collections.abc import Sequence
from math import prod
from typing import Any

from spbench.bench.tools.calibrate.log_findings import Findings

#: busbw over algbw, as nccl-tests has it
FACTORS = {
    "all_reduce_perf": lambda n: 2 * (n - 1) / n,
    "all_gather_perf": lambda n: (n - 1) / n,
    "reduce_scatter_perf": lambda n: (n - 1) / n,
    "alltoall_perf": lambda n: (n - 1) / n,
    "sendrecv_perf": lambda n: 1.0,
}
SIZES = tuple(8 * 8**i for i in range(10))  # 8 bytes to 1 GiB


def nccl_log(
    program: str,
    latency_s: float,
    bandwidth: float,
    ranks: int = 8,
    hosts: int = 1,
    sizes: Sequence[int] = SIZES,
    card: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """What a program of nccl-tests prints where a collective takes latency + wire bytes / bandwidth."""
    factor = FACTORS[program](ranks)
    lines = [
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 8(factor) iters: 20",
        "#",
        "# Using devices",
    ]
    for rank in range(ranks):
        host, device = divmod(rank, ranks // hosts)
        place = f"node-{host} device {device:2} [0x{device:02x}]"
        lines.append(f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on {place} {card}")
    columns = "     time   algbw   busbw #wrong"
    units = "     (us)  (GB/s)  (GB/s)       "
    lines += [
        "#",
        f"#{'out-of-place':>66}{'in-place':>36}",
        f"#       size         count      type   redop    root{columns}{columns}",
        f"#        (B)    (elements)                          {units}{units}",
    ]
    for size in sizes:
        us = (latency_s + factor * size / bandwidth) * 1e6
        algbw = size / us / 1e3
        row = f"{us:8.2f} {algbw:7.2f} {factor * algbw:7.2f}      0"
        lines.append(f"{size:12} {size // 4:13}     float     sum      -1 {row} {row}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0", "#", ""])


def mamf_log(
    limit: float,
    bandwidth: float,
    shapes: Sequence[tuple[int, int, int]],
    dtype: str = "bfloat16",
    card: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """What mamf-finder writes to its file where a product takes FLOPs / limit + bytes / bandwidth."""
    lines = [
        "** Command line:",
        "python mamf-finder.py --output_file=log.txt",
        "",
        f"** Dtype: torch.{dtype}",
        "",
    ]
    lines += [f"- _CudaDeviceProperties(name='{card}', major=9, minor=0)", ""]
    for number, (m, n, k) in enumerate(shapes, 1):
        flops, size = 2 * m * n * k, 4 if dtype == "float32" else 2
        seconds = flops / limit + size * (m * k + k * n + m * n) / bandwidth
        speed = f"{flops / seconds / 1e12:6.1f}"
        of_shape = f"{speed}(mean) {speed}(median) {speed}(max)"
        lines.append(f"{number:>6} | {of_shape} @ {f'{m}x{n}x{k}':<20} | best: {of_shape} TFLOPS")
    return "\n".join(lines) + f"\n\nTried {len(shapes)} shapes => the best outcomes were:\n"


def flash_log(limit: float, half_length: float, causal: bool = True, head_size: int = 128) -> str:
    """What flash-attention's benchmark prints where a kernel reaches limit / (1 + half length / length), and
    its backward pass 0.8 of that."""
    lines = []
    for batch, length in ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)):
        forward = limit / (1 + half_length / length) / 1e12
        lines.append(f"### causal={causal}, headdim={head_size}, batch_size={batch}, seqlen={length} ###")
        both = 3.5 / (1 / forward + 2.5 / (0.8 * forward))
        unit = "TFLOPs/s"
        speeds = f"fwd: {forward:.2f} {unit}, bwd: {0.8 * forward:.2f} {unit}, fwd + bwd: {both:.2f} {unit}"
        lines += [f"Flash2 {speeds}", f"Pytorch fwd: 60.00 {unit}, bwd: 0.00 {unit}, fwd + bwd: 0.00 {unit}"]
    return "\n".join(lines) + "\n"


class Trace:
    """The Chrome trace of a profiled step, which grows by operators with the kernels that they launch."""

    def __init__(self, gap_us: float = 2.0):
        self.gap_us, self.now, self.events = gap_us, 1000.0, list[dict[str, Any]]()

    def launch(
        self,
        name: str,
        tensors: Sequence[Sequence[int]],
        us: float,
        *,
        dtype: str = "c10::BFloat16",
        **further: Any,
    ) -> None:
        """An operator on contiguous tensors of these shapes, whose one kernel takes that long.

        ``further``: other arguments of the operator's event, with _ for each space of their names, and
        ``kernel``, the kernel's name."""
        number = len(self.events)
        kernel = further.pop("kernel", "void some_kernel<128>()")
        strides = [[prod(shape[i + 1 :]) for i in range(len(shape))] for shape in tensors]
        inputs = {
            "External id": number,
            "Input Dims": [list(shape) for shape in tensors],
            "Input type": [dtype] * len(tensors),
            "Input Strides": strides,
            **{key.replace("_", " "): value for key, value in further.items()},
        }
        times = {"ts": self.now, "dur": us}
        launched = {"External id": number, "device": 0, "stream": 7, "correlation": number}
        self.events += [
            {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, **times, "args": inputs},
            {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, **times, "args": launched},
        ]
        self.now += us + self.gap_us

    def content(self) -> dict[str, Any]:
        """What export_chrome_trace would write."""
        card = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85029158912}
        return {
            "schemaVersion": 1,
            "deviceProperties": [card],
            "record_shapes": 1,
            "traceEvents": self.events,
        }


def points_of(found: Findings) -> int:
    """How many measurements a log has."""
    measured = (found.matmuls, found.attention, found.passes, found.launch_gaps_s, found.collectives)
    return sum(map(len, measured))
