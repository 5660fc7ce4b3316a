"""What the finder of achievable matmul FLOPS prints: mamf-finder.py of ml-engineering.

A log gives the speed of each shape (the median of its iterations), or only the speed of the best shape.
"""

import re
from collections.abc import Iterator
from itertools import chain

from spbench.bench.tools.calibrate.log_findings import Findings, LogFile, TimedMatmul, log_table

_LOG = log_table(__file__)


def read(log: LogFile) -> Findings | None:
    """The timed matmuls of a log of mamf-finder, all of one precision; None if the log is of another kind."""
    if not _LOG.known.search(log.text):
        return None
    text = re.sub(r"\r|\x1b\[K", "\n", log.text)
    dtypes = {name for pair in _LOG.dtype.findall(text) for name in pair if name}
    if len(dtypes) != 1:
        raise log.damaged("a log of mamf-finder must name one dtype, as in '** Dtype: torch.bfloat16'")
    dtype = dtypes.pop()
    if dtype not in _LOG.precisions:
        raise log.damaged(
            f"matmuls of {dtype} have no place in a cluster's file ({', '.join(_LOG.precisions)})"
        )
    if match := _LOG.negative.search(text):
        raise log.damaged(f"a speed of {match[1]} TFLOPS cannot be")
    speeds = [*_speeds(text, _LOG.one_speed, _LOG.three_speeds, _LOG.columns)] or [*_speeds(text, _LOG.best)]
    matmuls = [
        TimedMatmul.of_shape(_LOG.precisions[dtype], m, n, k, 2 * m * n * k / (tflops * 1e12))
        for m, n, k, tflops in speeds
        if min(m, n, k, tflops) > 0
    ]
    if not matmuls:
        raise log.damaged("a log of mamf-finder without a shape and its TFLOPS; was the run cut off?")
    tried = _LOG.tried.search(text)
    of = f", the best of {tried[1] or tried[2]} shapes" if tried and len(matmuls) == 1 else ""
    card = _LOG.card.search(text)
    return Findings(f"mamf-finder{of}", card[1] if card else "", matmuls=matmuls)


def _speeds(text: str, *patterns: re.Pattern[str]) -> Iterator[tuple[int, int, int, float]]:
    for match in chain.from_iterable(pattern.finditer(text) for pattern in patterns):
        yield int(match["m"]), int(match["n"]), int(match["k"]), float(match["tflops"])
