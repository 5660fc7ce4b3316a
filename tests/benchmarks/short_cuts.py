"""CPU seconds that each short cut saves: the cells of scenarios, and tests, with one short cut off at a time.

``python tests/benchmarks/short_cuts.py max_seqlen:6 gate:1`` measures every sixth virtual cell of max_seqlen
and every cell of gate, in one process a short cut; ``SHORT_CUT=NAME pytest -p tests.benchmarks.short_cuts``
runs tests without one. results/benchmarks/performance.md says what the short cuts are.
"""

import dataclasses
import os
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from spbench.bench.measure.engines import search, traces, tracing, virtual
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.processes import starting as processes
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.trace import recorder
from spbench.impls.layout import Unsupported


def _unlike_all_others(*_: Any) -> object:
    return object()


def _every_rank(traced: virtual.ClassTraces, *cluster: Any) -> Any:
    return _simulator(dataclasses.replace(traced, fold=False), *cluster)


def _nothing_chosen(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _all_layers(*_: Any) -> None:
    return None


def _no_key(*_: Any) -> None:
    return None


_simulator = virtual.ClassTraces.simulator
#: short cut -> what is put in the place of what: module or class, name, other value
_OFF: dict[str, tuple[Any, str, Any]] = {
    "remembered operators": (recorder.operator_results, "key_of", _no_key),
    "repeated steps": (recorder, "choosing_steps", _nothing_chosen),
    "layers put together": (tracing, "few_layers", _all_layers),
    "micro-batches on a line": (virtual, "counts_on_line", _no_key),
    "folding": (virtual.ClassTraces, "simulator", _every_rank),
    "extrapolation": (search, "_events", _unlike_all_others),
    "preloaded": (processes, "START_METHOD", "spawn"),
}


def _without(name: str) -> None:
    """Turn a short cut off in this process, or the traces on disk on."""
    if name in _OFF:
        setattr(*_OFF[name])
    elif name.startswith("disk"):
        os.environ["SPBENCH_CACHE"] = tempfile.mkdtemp()
        traces.keeping_traces().__enter__()


def _seconds(scenario: str, every: int, times: int = 1) -> float:
    cells = [cell for cells in load_scenario(scenario).cells.values() for cell in cells]
    chosen = [cell for cell in cells if cell.engine == "virtual"][::every]
    for _ in range(times):
        start = time.process_time()
        for cell in chosen:
            with suppress(Unsupported):
                run_cell(cell)
    return time.process_time() - start


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        scenario, every = asked.split(":")
        for mode in ("none", *_OFF, "disk", "disk, second run"):
            if mode == "preloaded":  # no process is started here
                continue
            if (child := os.fork()) == 0:
                _without(mode)
                seconds = _seconds(scenario, int(every), 2 if "second" in mode else 1)
                print(f"{asked:20} {mode:22} {seconds:8.2f} s", flush=True)
                os._exit(0)
            os.waitpid(child, 0)
elif name := os.environ.get("SHORT_CUT"):
    _without(name)
