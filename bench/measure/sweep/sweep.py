"""Sweeps: run cells on several processes, and write each result the moment its cell ends.

A row is kept with a digest of its causes, and is current only while the digest stays the same. The digest has
five parts, so that a message can say which part has changed:

- ``cluster``: the figures of the resolved cluster file (``extends`` followed), without sources and notes;
- ``model``, ``strategy``: class and options with defaults; ``model`` also has the cell's other settings, and
``strategy`` the versions of the packages that a peer calls;
- ``code``: the code that can change a measurement (:mod:`spbench.bench.measured_code`);
- ``torch``: its version.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.clusters.rate_tables import table_digest
from spbench.bench.measure.engines.engine import engine_class
from spbench.bench.measure.engines.run_cell import Run, measure, run_cell
from spbench.bench.measure.processes.starting import usable_cores
from spbench.bench.measure.steps.step_file import step_digest
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.measure.sweep.provenance import project_commit, provenance
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.worker import Crew
from spbench.bench.measure.verify.proof import Say, unproven
from spbench.bench.measured_code import DIGEST_LENGTH, code_digest
from spbench.bench.measurement import Measured, Measurement, Outcome
from spbench.bench.row import FINAL, Row
from spbench.impls import installed_version, model_preset, nesting, versions

PARTS = ("cluster", "model", "strategy", "code", "torch")

#: a function that returns the digest of a cell
Digesting = Callable[[Cell], Mapping[str, str]]

#: keys of a cluster file that say where a figure comes from
_ABOUT_FIGURES = ("name", "about", "source", "note", "fitted_on", "inferred_from", "measured")


def digest(cell: Cell) -> dict[str, str]:
    """The digest of a cell if it were measured now: a text for each of :data:`PARTS`.

    Raises:
        UserError: the cell's cluster file cannot be read.
        KeyError: an unknown model or strategy.
    """
    loaded = load_cluster(cell.cluster)
    cluster = loaded.model_dump(mode="json") | {
        "tables": {name: table_digest(name) for name in loaded.tables}
    }
    own = cell.strategy == OWN_STEP  # whose file is in no registry, and may lie elsewhere
    settings = cell.model_dump(mode="json", exclude={"model_config_json"} if own else None)
    return {
        "cluster": _sha256(_without_texts(cluster)),
        "model": _sha256([*([step_digest(cell)] if own else _model(*cell.model_arguments)), settings]),
        "strategy": _sha256([] if own else _strategy(cell.strategy, cell.strategy_options)),
        "code": code_digest(),
        "torch": installed_version("torch") or "",
    }


def digests_of_a_run() -> Digesting:
    """A function that returns a cell's :func:`digest` as it was when the function was first called for it."""
    digests: dict[str, Mapping[str, str]] = {}

    def of(cell: Cell) -> Mapping[str, str]:
        if (key := cell.key) not in digests:
            digests[key] = digest(cell)
        return digests[key]

    return of


def _model(name: str, options: Mapping[str, Any], config: Mapping[str, Any] | None) -> list[Any]:
    """The class of a model, and the values of all of its options."""
    model = model_preset(name, options, config)
    values = {field.name: getattr(model, field.name) for field in fields(model)}  # type: ignore[arg-type]
    return _plain([_path_of(type(model)), values])


def _strategy(name: str, options: Mapping[str, Any]) -> list[Any]:
    """The classes of a strategy, the values of all options, and the versions of a peer's packages."""
    strategies = nesting(name)
    classes = [_path_of(cls) for cls in strategies.classes]
    packages = versions(strategies.requires)
    return [*_plain([*classes, asdict(strategies.options_type()) | dict(options)]), *filter(None, [packages])]


def changed_parts(cell: Cell, row: Row, digest_of: Digesting = digest) -> list[str]:
    """The parts of the digest in which a row differs from the cell as it would be measured now: all of them
    for a row without a digest, which is from an older version.
    """
    now = digest_of(cell)
    return [p for p in PARTS if not isinstance(row.digest, Mapping) or row.digest.get(p) != now[p]]


def is_final(cell: Cell, row: Row | None, digest_of: Digesting = digest) -> bool:
    """Whether the row answers the cell, so that a sweep does not run the cell again."""
    if row is None or row.status not in FINAL or not row.final:
        return False
    return not changed_parts(cell, row, digest_of)


def outdated(cells: Iterable[Cell], rows: Mapping[str, Row], digest_of: Digesting = digest) -> str:
    """A line on earlier final results whose digest has changed, so that they must be run again: how many of
    all final ones, and how often each part of the digest has changed; "" if there are none.

    Args:
        rows: rows by key; rows of other cells are left out.
    """
    final = [(cell, row) for cell in cells if (row := rows.get(cell.key)) and row.status in FINAL]
    changed = (changed_parts(cell, row, digest_of) for cell, row in final)
    every = "from a version without digests"
    counts = Counter(every if len(each) == len(PARTS) else " and ".join(each) for each in changed if each)
    if not counts:
        return ""
    why = ", ".join(f"{parts} ({number})" for parts, number in counts.most_common())
    return f"{counts.total()} of {len(final)} earlier results are out of date and run again; changed: {why}"


def _without_texts(cluster: Any) -> Any:
    if isinstance(cluster, dict):
        return {key: _without_texts(value) for key, value in cluster.items() if key not in _ABOUT_FIGURES}
    return cluster


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(content: Any) -> Any:
    """The content after a round trip through JSON, so that a file gives the same digest."""
    return json.loads(json.dumps(content, default=repr))


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def unfinished(cells: Sequence[Cell], results: ResultsFile, digest_of: Digesting = digest) -> list[Cell]:
    """The cells without a final row: never run, failed, or run with another digest."""
    return [cell for cell in cells if not is_final(cell, results.rows.get(cell.key), digest_of)]


def at_once(cells: Sequence[Cell], jobs: int | None, executor: Executor | None = None) -> int:
    """The largest number of these cells that run at a time."""
    spread, together, _ = _by_place(cells, executor)
    most = executor.at_once if executor else 1
    return max(1, min(jobs or usable_cores(), len(together)), min(most, len(spread)))


def sweep(
    cells: Sequence[Cell],
    results: ResultsFile,
    *,
    run: Run = run_cell,
    crew: Crew | None = None,
    executor: Executor | None = None,
    jobs: int | None = None,
    digest_of: Digesting | None = None,
    unverified: bool = False,
    say: Say = lambda text: None,
    on_start: Callable[[Cell], None] = lambda cell: None,
    on_end: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run the unfinished cells, and return the rows of all cells, in the order of ``cells``.

    A cell that raises, or whose process dies, is a row with status failed; one that reaches its limit
    (:attr:`Cell.timeout_s`) is a row with status timeout; one that is :func:`unproven` is not run; the sweep
    goes on. An interrupt, or a row that cannot be written, ends the sweep and its processes; only cells that
    were running are lost.

    Args:
        run: the function that measures a cell, of a module that other processes can import.
        crew: workers to use, which stay unless the sweep is interrupted; None: the sweep's own.
        executor: runs the cells that need nothing of this machine (:attr:`Engine.is_exact`), before the
            others; None: the crew runs all.
        jobs: processes of the crew; None: one a usable core; 0: this process runs the cells, without limits.
        digest_of: returns a cell's digest; None: :func:`digests_of_a_run`.
        unverified: run cells that are not proven right too; their rows are a mismatch (:func:`marked`).
        say, on_start, on_end: called with a line on verification, a cell that begins, a row that ended.

    Raises:
        UserError: a row cannot be written, or the executor's machines cannot go on.
    """
    digest_of = digest_of or digests_of_a_run()
    todo = sorted(unfinished(cells, results, digest_of), key=_relative_cost, reverse=True)
    # before cells run, because a cluster file may be edited meanwhile
    made_by = {cell.key: digest_of(cell) for cell in todo}
    project = project_commit(Path.cwd()) if todo else None  # before rows are written, which it may track
    refused = unproven(todo, say=say)
    measured = [cell for cell in todo if unverified or cell.key not in refused]
    spread, together, alone = ([], [], []) if jobs == 0 else _by_place(measured, executor)
    own = crew or Crew()
    try:
        for cell, outcome in chain(
            _refusals(todo, {} if unverified else refused, on_start),
            executor.outcomes(spread, run, on_start) if executor else (),
            own.outcomes([(cell, run) for cell in together], jobs or usable_cores(), on_start),
            own.outcomes([(cell, run) for cell in alone], 1, on_start),
            ((cell, measure(run, cell)) for cell in (measured if jobs == 0 else ())),
        ):
            row = as_row(cell, marked(outcome, refused.get(cell.key)), made_by[cell.key], project)
            results.append(row)
            on_end(row)
    except BaseException:
        own.dismiss()
        raise
    if crew is None:
        own.dismiss()
    return [results.rows[cell.key] for cell in cells]


#: the name of :func:`sweep` outside this package, in which ``sweep`` is the name of a room
sweep_cells = sweep


def marked(outcome: Outcome, refused: Outcome | None) -> Outcome:
    """The outcome of a cell; with the status "mismatch" and a reason if the cell is ``refused`` as
    unverified."""
    if refused is None or outcome is refused or outcome.status not in ("ok", "oom"):
        return outcome
    return replace(outcome, status="mismatch", reason=f"unverified: {refused.reason}")


def _by_place(cells: Sequence[Cell], executor: Executor | None) -> tuple[list[Cell], list[Cell], list[Cell]]:
    """The cells for other machines, those that share this machine, and those that must run alone on it."""
    spread = [cell for cell in cells if executor is not None and _runs_anywhere(cell)]
    here = [cell for cell in cells if executor is None or not _runs_anywhere(cell)]
    together = [cell for cell in here if not _runs_alone(cell)]
    return spread, together, [cell for cell in here if _runs_alone(cell)]


def _refusals(
    cells: list[Cell], refused: Mapping[str, Outcome], on_start: Callable[[Cell], None]
) -> Iterator[tuple[Cell, Outcome]]:
    for cell in cells:
        if cell.key in refused:
            on_start(cell)
            yield cell, refused[cell.key]


def as_row(
    cell: Cell, outcome: Outcome, made_by: Mapping[str, str] | None = None, project: str | None = None
) -> Row:
    """The result row of a cell.

    Args:
        made_by: the cell's digest when the cell began; None: its digest now.
        project: the commit of the project in which the cell ran (:func:`project_commit`).
    """
    of_project = {"project_commit": project} if project else {}
    further = {name: text for name in ("traceback", "log") if (text := getattr(outcome, name))}
    if not outcome.final:
        further["final"] = False
    return Row(
        key=cell.key,
        cell=cell.model_dump(mode="json"),
        status=outcome.status,
        reason=outcome.reason,
        measurement=Measured(**outcome.measurement),
        elapsed_s=outcome.elapsed_s,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        digest=digest(cell) if made_by is None else made_by,
        provenance={**(outcome.provenance or provenance()), **of_project},
        **further,
    )


def row_of(cell: Cell, measurement: Measurement) -> Row:
    """The result row of a cell that was measured outside of a sweep."""
    return as_row(cell, Outcome(measurement.status, measurement.reason, measurement.as_dict()))


#: about how many groups of micro-batches an interleaved pipeline runs before its schedule repeats
_GROUPS_TRACED = 3


def _relative_cost(cell: Cell) -> int:
    """An estimate of how long a cell takes, in no unit: a trace's operators grow with layers and ranks, and
    with micro-batches up to as many as repeat (:mod:`impls.keyed_steps`)."""
    if cell.strategy == OWN_STEP:
        return cell.sizes.world
    layers: int = getattr(model_preset(*cell.model_arguments), "layers", 1)
    repeating = cell.sizes.pp * (_GROUPS_TRACED if cell.training.schedule == "interleaved" else 1)
    return layers * cell.sizes.world * min(cell.training.micro_batches, repeating)


def _runs_alone(cell: Cell) -> bool:
    """Whether nothing else may run at the same time as the cell. Training runs share the cores, because
    losses do not depend on speed, and ranks that wait for one another leave cores idle."""
    return cell.learning is None and engine_class(cell.engine).runs_alone


def _runs_anywhere(cell: Cell) -> bool:
    """Whether the cell's row is the same on every machine."""
    return cell.learning is None and engine_class(cell.engine).is_exact
