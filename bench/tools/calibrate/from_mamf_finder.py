"""What the finder of achievable matmul FLOPS prints: mamf-finder.py of ml-engineering.

The speed of each shape where the log has it (the median of its iterations), else that of the best shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from spbench.bench.measure import Precision
from spbench.bench.tools.calibrate.log_findings import Findings, LogFile, TimedMatmul

_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_NUMBER = r"(?P<tflops>\d{1,9}(?:\.\d+)?)"
_SHAPE = r"(?P<m>\d{1,9})x(?P<n>\d{1,9})x(?P<k>\d{1,9})"
_KNOWN = re.compile(
    rf"mamf-finder|shapes => the best outcomes were|TFLOPS @ {_SHAPE}|The best outcome was .* shapes\)"
)
_DTYPE = re.compile(r"\*\* Dtype:\s*(?:torch\.)?(\w+)|--dtype[ =](?:torch\.)?(\w+)")
_CARD = re.compile(r"DeviceProperties\(name='([^']+)'")
#: a line a shape: of version 1 with one speed, of 2 and 3 with three of which one is "(median)"
_ONE_SPEED = re.compile(rf"^\s*\d+ \|\s*{_NUMBER} TFLOPS @ {_SHAPE}", re.MULTILINE)
_THREE_SPEEDS = re.compile(rf"^\s*\d+ \|[^@|]*?{_NUMBER}\(median\)[^@|]*@ {_SHAPE}", re.MULTILINE)
#: of version 4: number, shape, mean, median, max
_COLUMNS = re.compile(rf"^\s*\d+ +{_SHAPE} +\d+(?:\.\d+)? +{_NUMBER} +\d+(?:\.\d+)?(?= |$)", re.MULTILINE)
#: the best shape by the speed that steps come nearest to: what is sustained, or the median
_BEST = re.compile(
    rf"^(?:median:|MSMF[^:]*:|The best outcome was)\s*{_NUMBER} ?TFLOPS @ {_SHAPE}", re.MULTILINE
)
#: a speed that cannot be; a range, as "1-2", has no blank before it
_NEGATIVE = re.compile(r"(?:^|[\s|:])(-\d[\d.]*) ?(?:TFLOPS|\(median\))", re.MULTILINE)
_TRIED = re.compile(r"Tried\s+(\d+) shapes|\(tried (\d+) shapes\)")


def read(log: LogFile) -> Findings | None:
    """The matmuls of one precision."""
    if not _KNOWN.search(log.text):
        return None
    text = re.sub(r"\r|\x1b\[K", "\n", log.text)
    dtypes = {name for pair in _DTYPE.findall(text) for name in pair if name}
    if len(dtypes) != 1:
        raise log.damaged("a log of mamf-finder must name one dtype, as in '** Dtype: torch.bfloat16'")
    dtype = dtypes.pop()
    if dtype not in _PRECISIONS:
        raise log.damaged(f"matmuls of {dtype} have no place in a cluster's file ({', '.join(_PRECISIONS)})")
    if match := _NEGATIVE.search(text):
        raise log.damaged(f"a speed of {match[1]} TFLOPS cannot be")
    speeds = [*_speeds(text, _ONE_SPEED, _THREE_SPEEDS, _COLUMNS)] or [*_speeds(text, _BEST)]
    matmuls = [
        TimedMatmul.of_shape(_PRECISIONS[dtype], m, n, k, 2 * m * n * k / (tflops * 1e12))
        for m, n, k, tflops in speeds
        if min(m, n, k, tflops) > 0
    ]
    if not matmuls:
        raise log.damaged("a log of mamf-finder without a shape and its TFLOPS; was the run cut off?")
    tried = _TRIED.search(text)
    of = f", the best of {tried[1] or tried[2]} shapes" if tried and len(matmuls) == 1 else ""
    card = _CARD.search(text)
    return Findings(f"mamf-finder{of}", card[1] if card else "", matmuls=matmuls)


def _speeds(text: str, *patterns: re.Pattern[str]) -> Iterator[tuple[int, int, int, float]]:
    for match in chain.from_iterable(pattern.finditer(text) for pattern in patterns):
        yield int(match["m"]), int(match["n"]), int(match["k"]), float(match["tflops"])
