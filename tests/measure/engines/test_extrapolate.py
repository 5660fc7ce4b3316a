"""Predicted peaks are those of whole traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.deepened_traces import Effort
from spbench.bench.measure.engines.search import Guesses
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.meter import CommunicationMeter
from tests.measure.engines.cells import cell_of
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("kept_traces")


class Tracer:
    """Traces a cell at any size."""

    def __init__(self, cell: Cell):
        self.cell = cell

    def __call__(self, size: int, effort: Effort = "guess") -> Trace:
        return tracing.trace(self.cell.at(size), effort=effort)

    def peak(self, size: int) -> int:
        """The peak of the trace with all layers."""
        return self(size, "whole").memory.peak().nbytes

    def guesses(self, *points: int) -> Guesses:
        """What is guessed from these sizes, of a card of 1 GiB."""
        return Guesses(self.cell, self, points, 2**30)


def peak(guesses: Guesses, size: int) -> int:
    card, _ = guesses.memories(size)
    return card.peak().nbytes


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
    assert peak(trace.guesses(96, 192, 288), 1536) == trace.peak(1536)


@pytest.mark.slow
@cases(0)
def test_batch(strategy: str, n: int, changes: dict[str, Any]) -> None:
    trace = tracer("batch", strategy, n, 9, **changes)
    guesses = trace.guesses(2, 4)
    for batch in (3, 100):  # parameters, then activations hold the most
        assert peak(guesses, batch) == trace.peak(batch)


@pytest.mark.slow
def test_real_size() -> None:
    trace = tracer("seq_len", "ring_self_attention", 4, 12, model="bert-base", batch=16)
    assert peak(trace.guesses(128, 256, 384), 1024) == trace.peak(1024)


def test_sizes_of_two_programs_are_not_mixed() -> None:
    trace = tracer("seq_len", "single", 1, 2, batch=1, model_options={"softmax": "megatron"})
    guesses = trace.guesses(1984, 2048, 2112)  # the other kernel runs from 2112 keys on
    assert not guesses.extrapolates
    assert peak(guesses, 2240) == trace.peak(2240)


@pytest.mark.parametrize("size", [33, 50])
def test_a_size_of_another_program_is_traced(size: int) -> None:
    trace = tracer("seq_len", "single", 1, 3, batch=1, model_options={"softmax": "megatron"})
    guesses = Guesses(trace.cell, lambda units, effort: trace(64 * units, effort), [2, 3, 4], 2**30)
    assert guesses.confirm(32)  # 2048 keys
    assert guesses.extrapolates
    assert peak(guesses, size) != trace.peak(64 * size)
    assert not guesses.confirm(size)
    assert peak(guesses, size) == trace.peak(64 * size)
    assert guesses.confirm(size)


def test_a_program_below_the_samples_is_not_taken_for_theirs() -> None:
    guesses = tracer("batch", "single", 1, 4).guesses(2, 3)
    assert not guesses.confirm(1)  # a batch of one needs fewer copies


@pytest.mark.parametrize(("mib", "served"), [(76, False), (84, True)])
def test_what_the_allocator_loses_is_seen_in_a_guess(mib: int, served: bool) -> None:
    """On both cards 8 x 9 MiB fit; of a segment of 20 MiB, which holds two, 2 MiB are lost."""
    trace = Trace(
        *(cell_of("single", 1), 0, MemoryLog([9 * 2**20] * 8, [*range(1, 9)], [("forward", 0)])),
        *(CommunicationMeter({}), None, {}),
    )
    guesses = Guesses(trace.cell, lambda size, effort: trace, [1, 2], mib * 2**20)
    assert guesses.need(1) < 1
    assert guesses.served(1) is served


def guesses_of(need: Callable[[int], float], seen: list[int]) -> Guesses:
    def noted(size: int) -> float:
        seen.append(size)
        return need(size)

    cell = cell_of("single", 1)
    guesses = Guesses(cell, lambda size, effort: tracing.trace(cell), [1], 2**50)
    guesses.need = noted  # type: ignore[method-assign]
    return guesses


@pytest.mark.parametrize("low", [0, 300])
@pytest.mark.parametrize(
    ("need", "looks"),
    [
        (lambda n: 0.1 + n / 700, 8),  # a line: 630
        (lambda n: 0.1 + n / 700 + (n % 7) / 1000, 14),  # and a bit more with the last tile
        (lambda n: 0.4 + (n / 1000) ** 2, 10),  # scores of attention
        (lambda n: 0.5 if n <= 512 else 1.1, 16),  # powers of two on a host
    ],
)
def test_the_last_that_fits_is_seen_in_few_looks(need: Callable[[int], float], looks: int, low: int) -> None:
    seen: list[int] = []
    guesses = guesses_of(need, seen)
    last = guesses.last_that_fits(low, 2000)
    assert need(last) <= 1 < need(last + 1)
    assert len(seen) <= looks
    assert all(low < n < 2000 for n in seen)
    assert guesses.last_that_fits(low, 2000) == last
    assert len(seen) == len(set(seen))  # what was seen is remembered


@pytest.mark.parametrize(("need", "last"), [(2.0, 3), (0.1, 39)])
def test_none_and_all_fit(need: float, last: int) -> None:
    assert guesses_of(lambda n: need, []).last_that_fits(3, 40) == last
