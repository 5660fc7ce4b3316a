"""Sweeps: run cells on several processes, and keep each result the moment it is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from bench.cell import Cell
from bench.engines import run as run_on_engine
from bench.provenance import provenance
from bench.results import FINAL, ResultsFile, Row
from bench.workers import Outcome, Run, Worker, ended
from impls.models.model import model_preset

#: engines that start processes of their own: their cells run one at a time, with nothing beside them
EXCLUSIVE_ENGINES = ("distributed",)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unfinished(cells: Sequence[Cell], results: ResultsFile) -> list[Cell]:
    """The cells without a final row: those never run, and those that failed."""
    return [cell for cell in cells if results.rows.get(cell.key, {}).get("status") not in FINAL]


def at_once(cells: Sequence[Cell], jobs: int | None) -> int:
    """How many of these cells run at a time."""
    together = [cell for cell in cells if cell.engine not in EXCLUSIVE_ENGINES]
    return max(1, min(jobs or usable_cores(), len(together)))


def sweep(
    cells: Sequence[Cell],
    results: ResultsFile,
    *,
    run: Run = run_on_engine,
    jobs: int | None = None,
    on_start: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run the cells that are unfinished, and return the rows of all, in the order of ``cells``.

    A cell that raises, or whose process dies, is a row with status failed; the sweep goes on. An
    interrupt, or a row that cannot be written, ends the sweep and its processes; only cells that were
    running are lost.

    Args:
        run: measures a cell; a function of a module, since other processes import it.
        jobs: processes; None: one a usable core.
        on_start, on_end: called as cells begin and end.

    Raises:
        UserError: a row cannot be written.
        KeyboardInterrupt: passed on.
    """
    todo = sorted(
        unfinished(cells, results), key=_cost, reverse=True
    )  # the longest first: none is left at the end
    alone = [cell for cell in todo if cell.engine in EXCLUSIVE_ENGINES]
    together = [cell for cell in todo if cell.engine not in EXCLUSIVE_ENGINES]

    def keep(cell: Cell, outcome: Outcome) -> None:
        row = as_row(cell, outcome)
        results.append(row)
        on_end(row)

    _run_all(together, jobs or usable_cores(), run, on_start, keep)
    _run_all(alone, 1, run, on_start, keep)
    return [results.rows[cell.key] for cell in cells]


def _run_all(
    cells: list[Cell],
    jobs: int,
    run: Run,
    on_start: Callable[[Cell], None],
    keep: Callable[[Cell, Outcome], None],
) -> None:
    waiting = list(reversed(cells))
    workers: list[Worker] = []
    try:
        while waiting or any(worker.cell for worker in workers):
            idle = [worker for worker in workers if worker.cell is None]
            while waiting and (idle or len(workers) < jobs):
                if not idle:
                    workers.append(Worker(run))
                    idle.append(workers[-1])
                cell = waiting.pop()
                on_start(cell)
                idle.pop().give(cell)
            for worker in ended(workers):
                cell_ended = worker.cell
                assert cell_ended is not None
                outcome = worker.take()
                if not worker.alive:
                    workers.remove(worker)
                    worker.stop()
                    worker.reap()
                keep(cell_ended, outcome)
    finally:
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.reap()


def as_row(cell: Cell, outcome: Outcome) -> Row:
    """The result row of a cell."""
    row: Row = {
        "key": cell.key,
        "cell": cell.model_dump(mode="json"),
        "status": outcome.status,
        "reason": outcome.reason,
        "measurement": outcome.measurement,
        "elapsed_s": outcome.elapsed_s,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "provenance": provenance(),
    }
    if outcome.traceback:
        row["traceback"] = outcome.traceback
    return row


def _cost(cell: Cell) -> int:
    """What a cell takes, roughly and relatively: a trace's operators grow with layers and ranks."""
    return getattr(model_preset(cell.model, cell.model_options), "layers", 1) * cell.sizes.world
