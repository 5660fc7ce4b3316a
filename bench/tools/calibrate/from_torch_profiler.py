"""Chrome traces of torch.profiler (export_chrome_trace), packed or not.

The "External id" of a kernel names the operator that launched the kernel. A trace with the shapes of inputs
(record_shapes=True) gives times of matmuls and element-wise operators, and speeds of attention; a trace
without shapes gives only the gaps between kernels.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, zip_longest
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spbench.bench.measure import AttentionKernel, Direction
from spbench.bench.tools.calibrate.log_findings import (
    AttentionSpeed,
    Findings,
    LogFile,
    TimedMatmul,
    TimedPass,
)
from spbench.bench.yaml_files import read_yaml
from spbench.plots.series import grouped

T = TypeVar("T")


class AttentionOperator(NamedTuple):
    """The indices of an attention operator's inputs, from the YAML file of this module."""

    kernel: AttentionKernel
    direction: Direction
    query: int
    causal: int
    length_first: bool
    window: int | None = None


_OPERATORS = read_yaml(Path(__file__).with_suffix(".yaml"))
ATTENTION = {name: AttentionOperator(**where) for name, where in _OPERATORS["attention"].items()}


class _Launched(NamedTuple):
    """An operator, with the seconds and the names of the kernels that the operator launched."""

    name: str
    inputs: Mapping[str, Any]
    seconds: float
    kernels: tuple[str, ...]

    def shape(self, place: int) -> list[int]:
        """The shape of an input, [] if the input is no tensor. ValueError if no tensor has such a shape."""
        shapes = self.inputs["Input Dims"]
        shape: list[int] = shapes[place] if place < len(shapes) else []
        if not all(0 <= size < 2**63 for size in shape):
            raise ValueError("a size beyond 64 bits")
        return shape

    def kind(self, place: int) -> str:
        """The type of an input, such as "c10::Half"."""
        kinds = self.inputs.get("Input type") or []
        return kinds[place] if place < len(kinds) else ""

    def value(self, place: int) -> str:
        """The text of an input that is no tensor; "" if the trace has no value of the input."""
        values = self.inputs.get("Concrete Inputs") or []
        return values[place] if place < len(values) else ""


def read(log: LogFile) -> Findings | None:
    """The times of the kernels in a trace; None for a log of another kind."""
    if not log.text.lstrip().startswith("{") or '"traceEvents"' not in log.text:
        return None
    try:
        trace = json.loads(log.content)
    except (ValueError, RecursionError) as error:
        raise log.damaged(f"damaged JSON of a trace: {error}") from error
    try:
        return _findings(log, trace)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise log.damaged(f"a trace with events of another form ({type(error).__name__}: {error})") from error


def _findings(log: LogFile, trace: Mapping[str, Any]) -> Findings:
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    on_card = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if wrong := [event for event in on_card if not (isfinite(event["dur"]) and event["dur"] >= 0)]:
        raise log.damaged(
            f"{len(wrong)} events of a GPU have a duration below 0 or none, such as {wrong[0]['dur']}"
        )
    if not any(event["cat"] == "kernel" for event in on_card):
        raise log.damaged("a trace without kernels of a GPU; profile with ProfilerActivity.CUDA too")
    launched = list(_launched(events))
    remarks = []
    if not launched:
        remarks.append(f"{log.path}: no operator has shapes of its inputs; profile with record_shapes=True")
    cards = {card["name"]: card.get("totalGlobalMem") for card in trace.get("deviceProperties", [])}
    name = next(iter(cards)) if len(cards) == 1 else ""
    return Findings(
        "torch.profiler",
        name,
        memory_total_bytes=cards.get(name),
        matmuls=_all(_matmul, launched),
        attention=_all(_attention, launched),
        passes=_all(_pass, launched),
        launch_gaps_s=_gaps(on_card),
        remarks=remarks,
    )


def _all(kind: Callable[[_Launched], T | None], launched: Iterable[_Launched]) -> list[T]:
    return [kernel for each in launched if (kernel := kind(each)) is not None]


def _id(event: Mapping[str, Any]) -> Any:
    arguments = event.get("args") or {}
    return arguments.get("External id", arguments.get("external id"))


def _launched(events: list[dict[str, Any]]) -> Iterator[_Launched]:
    kernels = grouped((event for event in events if event.get("cat") == "kernel"), _id)
    kernels.pop(None, None)
    for event in events:
        if event.get("cat") == "cpu_op" and _id(event) in kernels and event["args"].get("Input Dims"):
            own = kernels[_id(event)]
            seconds = sum(kernel["dur"] for kernel in own) / 1e6
            if 0 < seconds < inf:
                names = tuple(kernel["name"] for kernel in own)
                yield _Launched(event["name"], event["args"], seconds, names)


def _matmul(each: _Launched) -> TimedMatmul | None:
    place = _OPERATORS["matmuls"].get(each.name)
    precision = None if place is None else _OPERATORS["precisions"].get(each.kind(place))
    if place is None or precision is None:
        return None
    if precision == "fp32" and any(word in name for name in each.kernels for word in _OPERATORS["tf32"]):
        return None
    *batch, m, k = each.shape(place)
    n = each.shape(place + 1)[-1]
    sizes = prod(batch), m, n, k
    return TimedMatmul.of_shape(precision, m, n, k, each.seconds, sizes[0]) if min(sizes) > 0 else None


def _attention(each: _Launched) -> AttentionSpeed | None:
    """The speed of a call of attention. None for other calls, and for calls whose shapes do not tell the
    FLOPs: packed sequences of several lengths, a window, or a causal mask that is not square."""
    operator = ATTENTION.get(each.name)
    if operator is None:
        return None
    query, key = each.shape(operator.query), each.shape(operator.query + 1)
    causal = each.value(operator.causal) == "True"
    half = each.kind(operator.query) in ("c10::Half", "c10::BFloat16")
    if len(query) != 4 or len(key) != 4 or not half:
        return None
    if operator.window is not None and each.value(operator.window) not in ("", "-1"):
        return None
    length, heads = (1, 2) if operator.length_first else (2, 1)
    queries, keys = query[length], key[length]
    flops = 4.0 * query[0] * query[heads] * queries * keys * query[3]
    flops *= (0.5 if causal else 1.0) * (2.5 if operator.direction == "backward" else 1.0)
    if flops == 0 or (causal and queries != keys):
        return None
    mask = "causal" if causal else "whole"
    speed = flops / each.seconds
    return AttentionSpeed(
        operator.kernel,
        query[3],
        mask,  # type: ignore[arg-type]  # one of two words
        operator.direction,
        min(queries, keys),
        speed,
    )


def _pass(each: _Launched) -> TimedPass | None:
    """The pass over memory of an element-wise call; None for other calls, or if an input is broadcast."""
    if each.name.removesuffix("_") not in _OPERATORS["element_wise"]:
        return None
    places = range(len(each.inputs["Input Dims"]))
    tensors = [(shape, place) for place in places if (shape := each.shape(place))]
    strides = each.inputs.get("Input Strides") or []
    if not tensors or any(0 in strides[place] for _, place in tensors if place < len(strides)):
        return None
    sizes = [_OPERATORS["bytes"].get(each.kind(place)) for _, place in tensors]
    if None in sizes:
        return None
    read = [prod(shape) * (size or 0) for (shape, _), size in zip(tensors, sizes, strict=True)]
    # shapes are aligned at their last axes, as if shorter ones had leading axes of 1
    written = prod(map(max, zip_longest(*(shape[::-1] for shape, _ in tensors), fillvalue=1)))
    in_place = each.name.endswith("_")
    item = (sizes[0] if in_place else max(filter(None, sizes))) or 0
    return TimedPass(sum(read) + written * item, each.seconds)


def _gaps(on_card: list[dict[str, Any]]) -> list[float]:
    """The seconds between the end of each event and the start of the next event, in the stream that has the
    most events."""
    streams = grouped(on_card, lambda e: (e.get("pid"), (e.get("args") or {}).get("stream", e.get("tid"))))
    busiest = max(streams.values(), key=len)
    busiest.sort(key=lambda event: event["ts"])
    gaps = (after["ts"] - before["ts"] - before["dur"] for before, after in pairwise(busiest))
    return [max(0.0, gap) / 1e6 for gap in gaps if isfinite(gap)]
