"""What a step costs to trace and to simulate by the number of ranks, from 8 to 1,024:
pytest tests/benchmarks/test_scale.py --benchmark-only --benchmark-json FILE

Every step is traced and simulated in a process of its own, which has traced the same cell on 8 ranks before.
The column of times is of all numbers of ranks together. ``extra_info`` of the JSON has each of them: ranks,
simulated ranks, events, CPU seconds of the trace and of what follows it (memory, timeline, breakdown), and
the peak resident bytes of the process (Linux); with the exponents, from 64 ranks on, of the CPU seconds and
of the bytes beyond those of 8 ranks. Nothing of it is judged here. It takes some minutes.
"""

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import virtual
from tests.grid import data

RANKS = (8, 64, 256, 1024)
#: from this one on a power law is fitted; below it most of the time is the same whatever the ranks
FITTED_FROM = 64

#: by name: the axis that the ranks are on, and the cell's other settings
CELLS = data(__file__)["CELLS"]


def scaled(name: str, ranks: int) -> Cell:
    """One of CELLS on that many ranks."""
    axis, settings = CELLS[name]
    return Cell.model_validate(
        {"sizes": {axis: ranks}, "precision": "bf16", "cluster": "dgx-a100", **settings}
    )


@dataclass(frozen=True)
class Scaled:
    """What one step cost; ``step_time_s`` is what was found out."""

    ranks: int
    simulated_ranks: int
    events: int
    trace_cpu_s: float
    simulation_cpu_s: float
    peak_rss_bytes: int
    step_time_s: float


def traced_and_simulated(name: str, ranks: int) -> Scaled:
    """Trace and simulate a cell, after a trace of it on the fewest ranks; to be run in a process of its
    own."""
    virtual.trace_classes(scaled(name, RANKS[0]), events=True).measurement()
    start = time.process_time()
    traces = virtual.trace_classes(scaled(name, ranks), events=True)
    traced = time.process_time()
    traces.memory_measurement()
    simulator = traces.simulator()
    timeline = simulator()
    breakdown = dict(timeline.breakdown)
    ended = time.process_time()
    del breakdown["hidden_communication_s"]
    assert math.isclose(sum(breakdown.values()), timeline.step_time_s)
    return Scaled(
        ranks=ranks,
        simulated_ranks=sum(len(steps.ranks) for steps in simulator.world.steps),
        events=sum(len(trace.program) for trace in traces.traces if trace.program is not None),
        trace_cpu_s=traced - start,
        simulation_cpu_s=ended - traced,
        peak_rss_bytes=peak_rss_bytes(),
        step_time_s=timeline.step_time_s,
    )


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far; getrusage would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def exponent(ranks: list[int], values: list[float]) -> float:
    """b of the power law a N^b that is nearest in logarithms."""
    slope, _ = np.polyfit(np.log(ranks), np.log(values), 1)
    return float(slope)


def by_ranks(name: str) -> list[Scaled]:
    """Each number of ranks in a process of its own."""
    found = []
    for ranks in RANKS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            found.append(alone.submit(traced_and_simulated, name, ranks).result())
    return found


@pytest.mark.parametrize("name", CELLS)
def test_a_step_by_the_number_of_ranks(benchmark: Any, name: str) -> None:
    found = benchmark.pedantic(by_ranks, (name,), rounds=1)
    large = [each for each in found if each.ranks >= FITTED_FROM]
    ranks, least = [each.ranks for each in large], found[0].peak_rss_bytes
    benchmark.extra_info.update(
        cell=scaled(name, RANKS[-1]).key,
        by_ranks=[asdict(each) for each in found],
        exponent_of_cpu_s=exponent(ranks, [each.trace_cpu_s + each.simulation_cpu_s for each in large]),
        exponent_of_added_rss=exponent(ranks, [max(1, each.peak_rss_bytes - least) for each in large]),
    )
    assert [each.ranks for each in found] == list(RANKS)
