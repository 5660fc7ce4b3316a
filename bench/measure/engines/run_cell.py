"""Run a cell on its engine, and turn the measurement, or whatever error was raised, into an outcome."""

import time
from collections.abc import Callable
from dataclasses import replace

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engine_class
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measurement import Measurement, Outcome, shortened
from spbench.impls import Unavailable, Unsupported, exits_refused, printed, told

#: a function that measures a cell
Run = Callable[[Cell], Measurement]


def run_cell(cell: Cell) -> Measurement:
    """The measurement of a cell by its engine: the answer of its search, its training run, or one step.

    Raises:
        Unsupported: the strategy cannot run these sizes, or the engine cannot search or train.
    """
    engine = engine_class(cell.engine)()
    if cell.search is not None:
        from spbench.bench.measure.engines import search  # torch, which a sweep's own process does without

        return search.search(cell, engine)
    if cell.learning is not None:
        return engine.learn(cell)
    return engine.measure(cell)


def measure(run: Run, cell: Cell) -> Outcome:
    """The outcome of ``run(cell)``, with its seconds. Errors become outcomes, but for KeyboardInterrupt."""
    start = time.perf_counter()
    try:
        with exits_refused():
            measurement = run(cell)
        outcome = Outcome(measurement.status, measurement.reason, measurement.as_dict())
    except Unsupported as error:
        outcome = Outcome("unsupported", str(error), final=not isinstance(error, Unavailable))
    except RankError as error:
        reason = shortened(error.reason)
        said = "" if error.status == "timeout" else str(error)
        outcome = Outcome(error.status, reason, traceback=said, log=error.log)
    except UserError as error:
        outcome = Outcome("failed", str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome = Outcome("failed", shortened(told(error)), traceback=printed(error))
    return replace(outcome, elapsed_s=time.perf_counter() - start)
