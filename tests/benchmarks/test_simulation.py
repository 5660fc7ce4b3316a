"""How quick a step is traced and simulated: part of `pytest tests/benchmarks -m micro`.

In CPU time, and as within a sweep, in a process that has done it before; large steps are those of
:mod:`tests.benchmarks.test_scale`.
"""

import time
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines import tracing, virtual
from spbench.bench.measure.memory.allocator import replay

pytestmark = pytest.mark.micro

#: by strategy: the axis of its ranks, and a model
STRATEGIES = {
    "ring_self_attention": ("sp", "bert-tiny"),
    "megatron_sp": ("tp", "bert-tiny"),
    "lasp": ("sp", "tnl-tiny"),
}


def small(strategy: str, ranks: int = 4) -> Cell:
    axis, model = STRATEGIES[strategy]
    sizes = Sizes.model_validate({axis: ranks})
    return Cell(model=model, strategy=strategy, sizes=sizes, batch=4, seq_len=128, cluster="dgx-a100")


@pytest.mark.benchmark(group="trace of a rank", timer=time.process_time)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trace_of_a_rank(benchmark: Any, strategy: str) -> None:
    """With the events that a simulation reads."""
    traced = benchmark.pedantic(
        tracing.trace, (small(strategy),), {"events": True}, rounds=10, warmup_rounds=1
    )
    assert traced.memory.peak().nbytes > 0


@pytest.mark.benchmark(group="simulation of a step", timer=time.process_time)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_simulation(benchmark: Any, strategy: str) -> None:
    """From the traces of all classes of ranks to the time of the step, on 4 ranks."""
    traces = virtual.trace_classes(small(strategy), events=True)
    timeline = benchmark.pedantic(lambda: traces.simulator()(), rounds=10, warmup_rounds=1)
    assert timeline.step_time_s > 0


@pytest.mark.benchmark(group="replay of the allocator", timer=time.process_time)
def test_small_replay(benchmark: Any) -> None:
    log = tracing.trace(small("ring_self_attention")).memory
    found = benchmark.pedantic(replay, (log.sizes, log.events, None), rounds=10, warmup_rounds=1)
    assert found.out_of_memory is None
