"""A search on any engine: the largest value that fits, proved by a step at each value that was tried."""

from __future__ import annotations

from collections.abc import Callable

from spbench.bench.cell import Cell, Measurement
from spbench.bench.engines.engine import Engine
from spbench.bench.engines.virtual import VirtualEngine
from spbench.bench.search.boundary import largest_that_fits, proof_of
from spbench.bench.search.quantities import Candidates


def search(cell: Cell, engine: Engine) -> Measurement:
    """The measurement at the largest value that fits, with ``answer`` and ``proof``; status oom, if not even
    the smallest value fits.

    Virtual ranks predict the answer from small traces. On any other engine the virtual answer is tried first,
    for the cell's rank or else the virtual one with the largest peak.

    Raises:
        Unsupported: the engine does not search, the strategy cannot run these sizes, or the cluster's memory
            has no limit.
    """
    if isinstance(engine, VirtualEngine):
        return largest_that_fits(cell)
    tried: dict[int, Measurement] = {}
    with engine.probes(cell) as probe:
        virtually, candidates = largest_that_fits(cell), Candidates(cell)
        rank = virtually.peak_rank if cell.rank is None else cell.rank

        def at(value: int) -> Cell:
            return candidates.at(value).model_copy(update={"rank": rank})

        def fits(number: int) -> bool:
            value = candidates.values[number - 1]
            tried[value] = probe(at(value))
            return tried[value].status != "oom"

        guess = candidates.values.index(virtually.answer) + 1 if virtually.answer else 1
        best = largest_fitting(len(candidates.values), fits, guess)
    answer = candidates.values[best - 1] if best else None
    measurement = tried[answer or candidates.values[0]]
    if answer and candidates.asked.timed:
        measurement = engine.measure(at(answer))
    measurement.answer = answer
    measurement.proof = [proof_of(value, found) for value, found in tried.items()]
    return measurement


def largest_fitting(count: int, fits: Callable[[int], bool], guess: int) -> int:
    """The largest of 1, ..., ``count`` for which ``fits`` is true; 0 if there is none.

    Whatever is below a number that fits must fit too. The guess is tried first, then numbers at distances
    that double from there until the answer changes, then the middle of what is left: two numbers where the
    guess is right.
    """
    low, high, step = 0, count + 1, 1  # low fits, high does not
    tried_low = tried_high = False
    at = min(max(guess, 1), count)
    while high - low > 1:
        if fits(at):
            low, tried_low = at, True
        else:
            high, tried_high = at, True
        if tried_low and tried_high:
            at = (low + high) // 2
        else:
            at = min(low + step, count) if tried_low else max(high - step, 1)
            step *= 2
    return low
