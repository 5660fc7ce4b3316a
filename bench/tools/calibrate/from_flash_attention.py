"""What flash-attention's benchmarks/benchmark_flash_attention.py prints: the speeds of attention kernels.

The benchmark counts FLOPs as a cluster's file does: half of the FLOPs under a causal mask, and 2.5 times the
FLOPs of the forward pass in the backward pass.
"""

from collections.abc import Iterator

from spbench.bench.tools.calibrate.log_findings import AttentionSpeed, Findings, LogFile, log_table

_LOG = log_table(__file__)
_UNIT = "TFLOPs/s"


def read(log: LogFile) -> Findings | None:
    """The speed of each kernel by mask, direction, head size and length; None for a log of another kind."""
    if not _LOG.sizes.search(log.text):
        return None
    speeds = list(_speeds(log))
    if not speeds:
        kernels = ", ".join(_LOG.kernels)
        raise log.damaged(
            f"sizes of flash-attention's benchmark without a line of {kernels}; was it cut off?"
        )
    return Findings("benchmark_flash_attention.py", attention=speeds)


def _speeds(log: LogFile) -> Iterator[AttentionSpeed]:
    sizes = None
    for number, line in enumerate(log.text.splitlines(), 1):
        sizes = _LOG.sizes.search(line) or sizes
        method = _LOG.method.match(line)
        kernel = _LOG.kernels.get(method[1].lower()) if method else None
        if sizes is None or kernel is None:
            continue
        mask = "causal" if sizes[1] == "True" else "whole"
        for direction, tflops, unit in _LOG.speed.findall(line):
            if not _LOG.number.fullmatch(tflops) or unit != _UNIT:
                said = f"{direction}: {tflops} {unit}".strip()
                raise log.damaged(f"line {number}: {said!r} is no speed in {_UNIT}")
            if 0 < float(tflops) < float("inf"):  # 0 and nan: the kernel did not run
                yield AttentionSpeed(
                    kernel,
                    int(sizes[2]),
                    mask,  # type: ignore[arg-type]  # one of two words
                    _LOG.directions[direction],
                    int(sizes[4]),
                    float(tflops) * 1e12,
                )
