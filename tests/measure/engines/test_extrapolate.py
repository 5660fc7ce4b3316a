"""Predicted peaks are those of whole traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.extrapolate import Needs, NotOneProgram, PeakModel, Programs
from spbench.bench.measure.trace.memory_log import MemoryLog
from tests.measure.engines.cells import cell_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("kept_traces")


class Tracer:
    """Guesses the memory log of a cell at any size."""

    def __init__(self, cell: Cell):
        self.cell = cell

    def __call__(self, size: int) -> MemoryLog:
        return tracing.trace(self.cell.at(size), effort="guess").memory

    def peak(self, size: int) -> int:
        """The peak of the trace with all layers."""
        return tracing.trace(self.cell.at(size), effort="whole").memory.peak().nbytes


def tracer(quantity: str, strategy: str, n: int, layers: int, **changes: Any) -> Tracer:
    changes["model_options"] = {**changes.get("model_options", {}), "layers": layers}
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
    trace = tracer("seq_len", strategy, n, 9, **changes)
    assert PeakModel(trace, [96, 192, 288])(1536) == trace.peak(1536)


@pytest.mark.slow
@cases(0)
def test_batch(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("batch", strategy, n, 9, **changes)
    predict = PeakModel(trace, [2, 4])
    for batch in (3, 100):  # parameters, then activations hold the most
        assert predict(batch) == trace.peak(batch)


@pytest.mark.slow
def test_real_size() -> None:
    trace = tracer("seq_len", "ring_self_attention", 4, 12, model="bert-base", batch=16)
    assert PeakModel(trace, [128, 256, 384])(1024) == trace.peak(1024)


@pytest.mark.slow
def test_whole_trace_resized() -> None:
    trace = tracer("seq_len", "tensor_parallel", 2, 5)
    predict = PeakModel(trace, [96, 192, 288])
    at, to = trace(480), trace(512)
    assert at.events == to.events
    assert sum(predict.resized(at, 480, 512)) == pytest.approx(sum(to.sizes), rel=1e-3)


def test_sizes_of_two_programs_are_not_mixed() -> None:
    trace = tracer("seq_len", "single", 1, 2, batch=1, model_options={"softmax": "megatron"})
    with pytest.raises(NotOneProgram, match="1984, 2048, 2112"):
        PeakModel(trace, [1984, 2048, 2112])


@pytest.mark.slow
def test_programs_are_told_apart() -> None:
    trace = tracer("seq_len", "single", 1, 3, batch=1, model_options={"softmax": "megatron"})
    programs = Programs(lambda units: trace(64 * units), [2, 3, 4])
    assert programs.confirm(32)  # 2048 keys
    assert not programs.confirm(50)
    assert programs.starts == [0, 33]  # the other kernel runs from 2112 keys on
    assert programs.confirm(50)
    assert programs.confirm(20)
    for units in (32, 50):
        assert programs.model(units)(units) == trace.peak(64 * units)


def test_a_program_below_the_samples_is_not_taken_for_theirs() -> None:
    programs = Programs(tracer("batch", "single", 1, 4), [2, 3])
    with pytest.raises(NotOneProgram):
        programs.confirm(1)  # a batch of one needs fewer copies
    assert (len(programs.starts), len(programs.models)) == (1, 1)


def test_a_peak_is_predicted_from_as_many_sizes_as_are_given() -> None:
    sizes: list[int] = []

    def trace(size: int) -> MemoryLog:
        sizes.append(size)
        return MemoryLog([size, 2 * size], [1, 2, -2, -1], [("forward", 1)])

    assert PeakModel(trace, [1024, 2048])(4096) == 3 * 4096
    assert sizes == [1024, 2048]


def needs(part: Callable[[int], float], seen: list[int]) -> Needs:
    def noted(size: int) -> float:
        seen.append(size)
        return part(size)

    asked = Needs(cell_of("single", 1), lambda size: tracing.trace(cell_of("single", 1)), 1)
    asked.part = noted
    return asked


@pytest.mark.parametrize(("low", "most"), [(0, 1.0), (300, 1.0), (300, 0.9)])
@pytest.mark.parametrize(
    ("part", "looks"),
    [
        (lambda n: 0.1 + n / 700, 6),  # a line: 630
        (lambda n: 0.1 + n / 700 + (n % 7) / 1000, 14),  # and a bit more with the last tile
        (lambda n: 0.5 if n <= 512 else 1.1, 16),  # powers of two on a host
    ],
)
def test_the_last_that_fits_is_seen_in_few_looks(
    part: Callable[[int], float], looks: int, low: int, most: float
) -> None:
    seen: list[int] = []
    last = needs(part, seen).last_that_fits(low, 2000, most)
    assert part(last) <= most < part(last + 1)
    assert len(seen) <= looks
    assert all(low < n < 2000 for n in seen)


@pytest.mark.parametrize("part", [lambda n: 2.0, lambda n: 0.1])
def test_none_and_all_fit(part: Callable[[int], float]) -> None:
    assert needs(part, []).last_that_fits(3, 40) == (3 if part(1) > 1 else 39)
