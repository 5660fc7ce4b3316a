"""Predicted peaks are those of whole traces."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.extrapolate import DEPTHS, NotOneProgram, PeakModel, Programs
from spbench.bench.measure.trace.memory_log import MemoryLog
from tests.measure.engines.cells import cell_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("kept_traces")


class Tracer:
    """Traces a cell at any size and depth, and counts."""

    def __init__(self, cell: Cell):
        self.cell, self.count = cell, 0

    def __call__(self, size: int, layers: int | None) -> MemoryLog:
        self.count += 1
        cell = self.cell.at(size)
        if layers is not None:
            cell = cell.model_copy(update={"model_options": {**cell.model_options, "layers": layers}})
        return tracing.trace(cell).memory


def tracer(quantity: str, strategy: str, n: int, **changes: Any) -> Tracer:
    asked = {"batch": 8, "seq_len": 192, "precision": "fp16"} | changes | {quantity: None}
    return Tracer(cell_of(strategy, n, search=SearchRequest.model_validate({"quantity": quantity}), **asked))


CASES = [
    ("single", 1, {}),
    ("ring_self_attention", 2, {"model_options": {"checkpointing": True, "mask_shape": "square"}}),
    ("tensor_parallel", 3, {"model": "bert-tiny-linformer"}),
    ("ring_self_attention", 3, {"training": {"gradients": "stale", "moments": "later"}}),
    ("single", 1, {"precision": "fp32", "model_options": {"dropout": 0.1, "softmax": "plain"}}),
    ("tensor_parallel", 4, {"model_options": {"checkpointing": True}}),
    ("ring_self_attention", 4, {"model": "bert-tiny-linformer", "precision": "fp32"}),
]


def cases(*always: int) -> pytest.MarkDecorator:
    """A parameter for each of the cases, of which only these are always run."""
    marked = [case if number in always else slow(*case) for number, case in enumerate(CASES)]
    return pytest.mark.parametrize(("strategy", "n", "changes"), marked)


@cases(1)
def test_length(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("seq_len", strategy, n, **changes)
    predict = PeakModel(trace, [96, 192, 288], 5)
    assert predict(1536) == pytest.approx(trace(1536, 5).peak().nbytes, rel=1e-3)


@pytest.mark.slow
@cases(0)
def test_batch(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("batch", strategy, n, **changes)
    predict = PeakModel(trace, [2, 4], 6)
    for batch in (3, 100):  # parameters, then activations hold the most
        assert predict(batch) == pytest.approx(trace(batch, 6).peak().nbytes, rel=1e-3)


@pytest.mark.slow
def test_real_size() -> None:
    trace = tracer("seq_len", "ring_self_attention", 4, model="bert-base", batch=16)
    predict = PeakModel(trace, [128, 256, 384], 12)
    assert predict(1024) == pytest.approx(trace(1024, 12).peak().nbytes, rel=1e-3)


@pytest.mark.slow
def test_whole_trace_resized() -> None:
    trace = tracer("seq_len", "tensor_parallel", 2)
    predict = PeakModel(trace, [96, 192, 288], 5)
    at, to = trace(480, 5), trace(512, 5)
    assert at.events == to.events
    # buffers of all layers, which only hold the position embedding beside, are taken for constant
    assert sum(predict.resized(at, 480, 512)) == pytest.approx(sum(to.sizes), rel=1e-3)


def test_sizes_of_two_programs_are_not_mixed() -> None:
    trace = tracer("seq_len", "single", 1, batch=1, model_options={"softmax": "megatron"})
    with pytest.raises(NotOneProgram, match="1984, 2048, 2112"):
        PeakModel(trace, [1984, 2048, 2112], 2)


@pytest.mark.slow
def test_programs_are_told_apart() -> None:
    trace = tracer("seq_len", "single", 1, batch=1, model_options={"softmax": "megatron"})
    programs = Programs(lambda units, layers: trace(64 * units, layers), [2, 3, 4], 3)
    assert programs.confirm(32)  # 2048 keys
    assert not programs.confirm(50)
    assert programs.starts == [0, 33]  # the other kernel runs from 2112 keys on
    assert programs.confirm(50)
    assert programs.confirm(20)
    for units in (32, 50):
        predicted = programs.model(units)(units)
        assert predicted == pytest.approx(trace(64 * units, 3).peak().nbytes, rel=1e-3)


def test_a_program_below_the_samples_is_not_taken_for_theirs() -> None:
    trace = tracer("batch", "single", 1)
    programs = Programs(trace, [2, 3], 4)
    with pytest.raises(NotOneProgram):
        programs.confirm(1)  # a batch of one needs fewer copies
    assert (len(programs.starts), len(programs.models)) == (1, 1)


@pytest.mark.parametrize(("layers", "traced"), [(None, (None,)), (3, (3,)), (4, (2, 3))])
def test_only_a_deeper_model_is_predicted_from_shallow_ones(
    layers: int | None, traced: tuple[int | None, ...]
) -> None:
    depths: list[int | None] = []

    def trace(size: int, depth: int | None) -> MemoryLog:
        depths.append(depth)
        return MemoryLog([size, 2 * size], [1, 2, -2, -1], [("forward", 1)])

    assert PeakModel(trace, [1024, 2048], layers)(4096) == 3 * 4096
    assert tuple(depths) == tuple(depth for depth in traced for _ in range(2))


def step_with_buckets(layers: int) -> MemoryLog:
    """The step of a model whose layers keep 4 KiB of activations each, and whose update has buckets of three
    layers in 2 KiB buffers of their own, a rest of which goes to the bucket before: so three layers have
    fewer events in the update than two."""
    log = MemoryLog()

    def born(nbytes: int) -> int:
        log.sizes.append(nbytes)
        log.events.append(len(log.sizes))
        return len(log.sizes)

    states = [born(1024) for _ in range(layers)]
    log.marks.append(("forward", len(log.events)))
    kept = [born(4096) for _ in range(layers)]
    log.marks.append(("backward", len(log.events)))
    for number in reversed(kept):
        temporary = born(8192)
        log.events += [-temporary, -number]
    log.marks.append(("optimizer", len(log.events)))
    for _ in range(layers // 3 or layers):
        log.events.append(-born(2048))
    log.marks.append(("end", len(log.events)))
    log.events += [-number for number in states]
    return log


@pytest.mark.parametrize("layers", [4, 7, 30])
def test_a_deeper_model_may_have_fewer_events_in_a_phase(layers: int) -> None:
    shallow, deeper = (step_with_buckets(n) for n in DEPTHS)
    events = [dict(log.spans())["optimizer"] for log in (shallow, deeper)]
    assert events[0].stop - events[0].start > events[1].stop - events[1].start
    predict = PeakModel(lambda _, depth: step_with_buckets(depth or layers), [1], layers)
    assert predict(1) == step_with_buckets(layers).peak().nbytes == 8192 + layers * (1024 + 4096)


def test_a_peak_is_where_something_is_born() -> None:
    """In a deeper model the same place may be one where something dies: what is alive there is not linear in
    depth, and is no peak."""

    def trace(_: int, depth: int | None) -> MemoryLog:
        # one storage a layer; they die one after another in the shallow model, at the end in the deeper one
        n = depth or 0
        born, dead = [*range(1, n + 1)], [-number for number in range(1, n + 1)]
        log = MemoryLog([1024] * (n + 1), [*born, *dead], [("forward", 0), ("optimizer", n)])
        if n == DEPTHS[0]:
            log.events.append(n + 1)
        else:
            log.events.insert(n, n + 1)
        return log

    # of five layers: five storages, and the last one with the deeper model's five still alive
    predict = PeakModel(trace, [1], 5)
    assert predict(1) <= 6 * 1024
