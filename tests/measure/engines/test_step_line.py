"""Steps of very many micro-batches, from three of a few, beside the whole ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.step_line import StepNumbers, calls_on_line, counts_on_line, on_line
from spbench.bench.measure.simulator.step_parts import Flops
from spbench.bench.measure.trace.meter import CommunicationMeter, Operation
from tests.measure.engines.cells import approximately
from tests.measure.engines.short_cut_cells import staged

_MEGATRON = {
    "backend": "megatron",
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "steps": 2,
    "moments": "later",
}
#: the last stage keeps the loss of each micro-batch
SMALL = staged(84, batch=84, sizes={"pp": 2, "tp": 2}, model_options={"layers": 2})
#: experts' plain permutation calls operators without a price
UNPRICED = staged(
    84,
    model="moe-tiny",
    strategy="single",
    batch=168,
    sizes={"pp": 2, "dp": 2, "ep": 2},
    model_options={"layers": 2},
)
INTERLEAVED = staged(
    144,
    batch=144,
    sizes={"pp": 6, "tp": 2},
    model_options={"layers": 12},
    training={**_MEGATRON, "schedule": "interleaved", "virtual_stages": 2},
)
#: of which few are traced from a short step
AHEAD = staged(
    100, batch=200, sizes={"pp": 7, "tp": 2, "dp": 2}, model_options={"layers": 7}, training=_MEGATRON
)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(SMALL, id="1f1b"),
        pytest.param(UNPRICED, id="1f1b with operators that have no price", marks=pytest.mark.slow),
        pytest.param(AHEAD, id="1f1b of 7 stages", marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_all_micro_batches(cell: Cell) -> None:
    """Every field: bytes exactly, seconds up to rounding."""
    counts = counts_on_line(cell)
    assert counts is not None
    line = virtual.measured_on_line(cell, counts, {})[0].model_dump()
    whole = virtual.trace_classes(cell, events=True).measurement().model_dump()
    assert whole["step_time_s"] > 0
    assert line == approximately(whole)


def test_a_step_that_is_on_no_line_is_simulated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = virtual.VirtualEngine()
    whole = virtual.trace_classes(SMALL, events=True).measurement()
    with monkeypatch.context() as only_few:
        only_few.setattr(virtual, "trace_classes", lambda *_, **__: pytest.fail("all micro-batches"))
        assert engine.measure(SMALL).peak_memory_bytes == whole.peak_memory_bytes
    simulate = StepNumbers.of
    slower = iter((1.0, 1.001, 1.0))  # the second of three

    def uneven(timeline: Any) -> StepNumbers:
        step = simulate(timeline)
        return replace(step, step_time_s=next(slower) * step.step_time_s)

    monkeypatch.setattr(StepNumbers, "of", uneven)
    assert engine.measure(SMALL) == whole
    assert next(slower, None) is None


def step(seconds: float, matmul_s: float = 1.0) -> StepNumbers:
    return StepNumbers(seconds, {"compute_s": seconds}, {"matmul_s": matmul_s}, {}, Flops(seconds, 0.0, 1.0))


def test_numbers_on_a_line() -> None:
    drawn = on_line((3, 4, 5), [step(3.0), step(4.0), step(5.0)], 11)
    assert drawn == step(11.0)
    for steps in ([step(3.0), step(4.1), step(5.0)], [step(3.0), step(4.0, 1.1), step(5.0)]):
        with pytest.raises(NotAlike, match="micro-batches are"):
            on_line((3, 4, 5), steps, 11)


def meter(*counts: int) -> CommunicationMeter:
    sent = CommunicationMeter({})
    for number, count in enumerate(counts):
        sent.counts[Operation("forward", "send", "pp", 2, 512 * (1 + number))] = count
    return sent


def test_calls_on_a_line() -> None:
    assert (
        calls_on_line((3, 4, 5), [meter(6, 1), meter(8, 1), meter(10, 1)], 11).counts == meter(22, 1).counts
    )
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 4, 5), [meter(6), meter(8), meter(11)], 11)
    with pytest.raises(NotAlike, match="calls of send"):
        calls_on_line((3, 5, 7), [meter(6), meter(7), meter(8)], 10)


def test_a_line_is_drawn_where_it_is_quicker() -> None:
    few = SMALL.training.model_copy(update={"micro_batches": 83})
    assert counts_on_line(SMALL) == (13, 14, 15)
    assert counts_on_line(SMALL.model_copy(update={"training": few})) is None
    assert counts_on_line(INTERLEAVED) == (18, 24, 30)
