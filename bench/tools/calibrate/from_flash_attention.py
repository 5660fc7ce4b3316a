"""What flash-attention's benchmarks/benchmark_flash_attention.py prints: the speeds of attention kernels.

Its FLOPs are counted as a cluster's file counts them: half of them under a causal mask, and in the backward
pass 2.5 times those of the forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from spbench.bench.measure import AttentionKernel, Direction
from spbench.bench.tools.calibrate.log_findings import AttentionSpeed, Findings, LogFile

#: the methods that are kernels without scores; "Pytorch" holds them, and those of xFormers are others' again
_KERNELS: dict[str, AttentionKernel] = {
    "flash1": "flash_attention_1",
    "flash2": "flash_attention_2",
    "flash3": "flash_attention_3",
    "flash4": "flash_attention_4",
    "triton": "triton",
    "cudnn": "cudnn",
}
_DIRECTIONS: dict[str, Direction] = {"fwd": "forward", "bwd": "backward"}
_SIZES = re.compile(r"### causal=(\w+), headdim=(\d{1,9}), batch_size=(\d+), seqlen=(\d{1,9}) ###")
_METHOD = re.compile(r"^\s*([\w.]+) (?=fwd:)")
_SPEED = re.compile(r"(?<!\+ )\b(fwd|bwd): *(\S+)(?: +(\w+/s))?")
_NUMBER = re.compile(r"\d{1,9}(?:\.\d+)?|nan|inf")
_UNIT = "TFLOPs/s"


def read(log: LogFile) -> Findings | None:
    """The speed of each kernel, mask, direction, head size and length."""
    if not _SIZES.search(log.text):
        return None
    speeds = list(_speeds(log))
    if not speeds:
        raise log.damaged(
            f"sizes of flash-attention's benchmark without a line of {', '.join(_KERNELS)}; was it cut off?"
        )
    return Findings("benchmark_flash_attention.py", attention=speeds)


def _speeds(log: LogFile) -> Iterator[AttentionSpeed]:
    sizes = None
    for number, line in enumerate(log.text.splitlines(), 1):
        sizes = _SIZES.search(line) or sizes
        method = _METHOD.match(line)
        kernel = _KERNELS.get(method[1].lower()) if method else None
        if sizes is None or kernel is None:
            continue
        mask = "causal" if sizes[1] == "True" else "whole"
        for direction, tflops, unit in _SPEED.findall(line):
            if not _NUMBER.fullmatch(tflops) or unit != _UNIT:
                said = f"{direction}: {tflops} {unit}".strip()
                raise log.damaged(f"line {number}: {said!r} is no speed in {_UNIT}")
            if 0 < float(tflops) < float("inf"):  # 0 and nan: it did not run
                yield AttentionSpeed(
                    kernel,
                    int(sizes[2]),
                    mask,  # type: ignore[arg-type]  # one of two words
                    _DIRECTIONS[direction],
                    int(sizes[4]),
                    float(tflops) * 1e12,
                )
