"""Sweeps: run cells on several processes, and keep each result the moment it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.declarations import declared
from spbench.bench.engines.engine import engine_class
from spbench.bench.engines.engine import run as run_on_engine
from spbench.bench.engines.peer_packages import requirements
from spbench.bench.processes import usable_cores
from spbench.bench.sweep.crew import Crew
from spbench.bench.sweep.digest import digest, is_final
from spbench.bench.sweep.provenance import provenance
from spbench.bench.sweep.results import ResultsFile, Row
from spbench.bench.sweep.workers import Outcome, Run


def unfinished(cells: Sequence[Cell], results: ResultsFile) -> list[Cell]:
    """The cells without a final row: never run, failed, or run when their digest was another."""
    return [cell for cell in cells if not is_final(cell, results.rows.get(cell.key))]


def unproven(cells: Sequence[Cell]) -> dict[str, Outcome]:
    """The outcome, numerics, of those of the cells whose strategy is a peer (:mod:`impls.peers`) that
    verification does not prove right, by key."""
    if not any(requirements(cell.strategy) for cell in cells):  # which is known without torch
        return {}
    from spbench.bench.verification.proof import reasons_against

    return {key: Outcome("numerics", reason) for key, reason in reasons_against(cells).items()}


def at_once(cells: Sequence[Cell], jobs: int | None) -> int:
    """How many of these cells run at a time."""
    together = [cell for cell in cells if not _runs_alone(cell)]
    return max(1, min(jobs or usable_cores(), len(together)))


def sweep(
    cells: Sequence[Cell],
    results: ResultsFile,
    *,
    run: Run = run_on_engine,
    crew: Crew | None = None,
    jobs: int | None = None,
    on_start: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run the cells that are unfinished, and return the rows of all, in the order of ``cells``.

    A cell that raises, or whose process dies, is a row with status failed; one that reaches its limit
    (:attr:`Cell.timeout_s`) is a row with status timeout; the sweep goes on. A cell of a peer that is not
    proven right is not run (:func:`unproven`). An interrupt, or a row that
    cannot be written, ends the sweep and its processes; only cells that were running are lost.

    Args:
        run: measures a cell; a function of a module, since other processes import it.
        crew: workers to use, which are there afterwards, unless the sweep is ended; None: of its own.
        jobs: processes; None: one a usable core.
        on_start, on_end: called as cells begin and end.

    Raises:
        UserError: a row cannot be written.
        KeyboardInterrupt: passed on.
    """
    # the longest first: none is left at the end
    todo = sorted(unfinished(cells, results), key=_relative_cost, reverse=True)
    # before the cells run: of a cluster file that is edited meanwhile it is unknown what a cell has seen
    made_by = {cell.key: digest(cell) for cell in todo}
    refused = unproven(todo)
    for key, outcome in refused.items():
        cell = next(cell for cell in todo if cell.key == key)
        on_start(cell)
        results.append(row := as_row(cell, outcome, made_by[key]))
        on_end(row)
    todo = [cell for cell in todo if cell.key not in refused]
    alone = [cell for cell in todo if _runs_alone(cell)]
    together = [cell for cell in todo if not _runs_alone(cell)]

    def keep(cell: Cell, outcome: Outcome) -> None:
        row = as_row(cell, outcome, made_by[cell.key])
        results.append(row)
        on_end(row)

    own = Crew(run) if crew is None else crew
    try:
        _run_all(together, jobs or usable_cores(), own, on_start, keep)
        _run_all(alone, 1, own, on_start, keep)
    except BaseException:
        own.dismiss()
        raise
    if crew is None:
        own.dismiss()
    return [results.rows[cell.key] for cell in cells]


def _run_all(
    cells: list[Cell],
    jobs: int,
    crew: Crew,
    on_start: Callable[[Cell], None],
    keep: Callable[[Cell, Outcome], None],
) -> None:
    waiting = list(reversed(cells))
    while waiting or crew.busy:
        while waiting and (worker := crew.idle(jobs)) is not None:
            on_start(waiting[-1])
            worker.give(waiting.pop())
        for cell, outcome in crew.ended():
            keep(cell, outcome)


def as_row(cell: Cell, outcome: Outcome, made_by: Mapping[str, str] | None = None) -> Row:
    """The result row of a cell.

    Args:
        made_by: the cell's digest when it began; None: as it is now.
    """
    row: Row = {
        "key": cell.key,
        "cell": cell.model_dump(mode="json"),
        "status": outcome.status,
        "reason": outcome.reason,
        "measurement": outcome.measurement,
        "elapsed_s": outcome.elapsed_s,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "digest": digest(cell) if made_by is None else made_by,
        "provenance": provenance(),
    }
    row |= {name: text for name in ("traceback", "log") if (text := getattr(outcome, name))}
    return row


def _relative_cost(cell: Cell) -> int:
    """An estimate of how long a cell takes, in no unit: a trace's operators grow with layers and ranks."""
    return _layers(cell.model, cell.model_options) * cell.sizes.world


@declared
def _layers(model: str, options: Mapping[str, Any]) -> int:
    """The layers of a model with some options changed; 1 where it has no such option."""
    from spbench.impls.models.model import model_preset

    return getattr(model_preset(model, options), "layers", 1)


def _runs_alone(cell: Cell) -> bool:
    """Whether nothing may run beside the cell. Losses are the same at any speed, and ranks that wait for one
    another leave cores idle, so training runs share the cores."""
    return cell.learning is None and _engine_runs_alone(cell.engine)


@declared
def _engine_runs_alone(engine: str) -> bool:
    return engine_class(engine).runs_alone
