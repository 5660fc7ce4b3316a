"""What ``spbench.run``, ``spbench.advise``, ``spbench.measure_step``, ``spbench.verify`` and
``spbench.read_results`` do."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spbench.bench.cell import Cell
from spbench.bench.command_line.record_forms import as_frame
from spbench.bench.errors import UserError
from spbench.bench.measure import RESULTS_FILE, Narrowing, Scenario, read_rows
from spbench.bench.measure.scenarios.expand import impossible
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.yaml_files import dotted
from spbench.impls.registries import DEFAULT_BACKEND

if TYPE_CHECKING:
    from pandas import DataFrame

    from spbench.bench.measure import Certainty, StepTraces
    from spbench.bench.measure.simulator.timeline import Timeline
    from spbench.bench.measurement import Measurement
    from spbench.bench.row import Row


def run(
    what: str | PathLike[str] | Scenario | Cell | Iterable[Cell],
    *,
    strategies: Sequence[str] = (),
    models: Sequence[str] = (),
    clusters: Sequence[str] = (),
    engines: Sequence[str] = (),
    world_sizes: Sequence[int] = (),
    variant: str | None = None,
    where: Sequence[tuple[str, str]] = (),
    output: str | PathLike[str] | None = None,
    fresh: bool = False,
    jobs: int | None = None,
) -> DataFrame:
    """Measure cells, and return one row for each, in their order.

    Args:
        what: a scenario, by its name, the path of its YAML file or as :func:`load_scenario` returns it; or
            cells.
        strategies: of a scenario's cells, only those of these strategies.
        models: only those of these models.
        clusters: run them on these clusters instead of the scenario's.
        engines: run them on these engines instead of the scenario's.
        world_sizes: only those of these numbers of ranks; one that the scenario lacks is added.
        variant: of the scenario's settings, or "all"; None: the first.
        where: only cells with these values of settings, as ("training.backend", "zero1").
        output: a folder that keeps the rows in cells.jsonl as they come; what it has already is not measured
            again as long as what made it is the same. None: nothing is kept.
        fresh: move aside what the folder has already.
        jobs: worker processes; None: one a usable core; 0: measure in this process, one cell after another,
            without their time limits.

    Returns:
        The columns are those of :func:`flat`: ``status`` is ok, oom, unsupported, mismatch, numerics, timeout
        or failed, with a ``reason``; numbers have their units in their names, NaN where there is none.

    Raises:
        UserError: something is unknown or cannot be; no cell is left; or the folder cannot be written.
    """
    narrowing = Narrowing(
        strategies=strategies,
        models=models,
        clusters=clusters,
        engines=engines,
        world_sizes=world_sizes,
        variant=variant,
        where=where,
    )
    cells = _chosen(what, narrowing)
    with ExitStack() as stack:
        folder = output or stack.enter_context(tempfile.TemporaryDirectory(prefix="spbench-"))
        results = stack.enter_context(ResultsFile(Path(folder), fresh=fresh))
        _warn(results.problems)
        return as_frame(sweep(cells, results, jobs=jobs))


def _chosen(what: str | PathLike[str] | Scenario | Cell | Iterable[Cell], narrowing: Narrowing) -> list[Cell]:
    if isinstance(what, str | PathLike):
        what = load_scenario(what)
    if isinstance(what, Scenario):
        return narrowing.cells(what)
    if narrowing != Narrowing():
        raise UserError("cells are run as they are; choose among them before, or give a scenario")
    cells = {cell.key: cell for cell in ([what] if isinstance(what, Cell) else what)}
    if not cells:
        raise UserError("there is no cell to run")
    for cell in cells.values():
        for path, message in impossible(cell):
            raise UserError(f"{cell.key}: {dotted(path)}: {message}")
    return list(cells.values())


def advise(
    *model: str,
    cluster: str | None = None,
    gpus: int | Sequence[int] | None = None,
    seq_len: int | Sequence[int] | None = None,
    batch_tokens: int | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    jobs: int | None = None,
) -> DataFrame:
    """The fastest layouts that fit, as `spbench advise` finds them.

    Args:
        model: a name, or the path of a config.json or .py file; a scenario; or the files of a job.
        cluster: its name or file.
        gpus: one number or several; None: those of the job or scenario.
        seq_len: one sequence length or several; None: that of the job or scenario.
        batch_tokens: tokens of the whole batch; None: 4 Mi, or the batch of the job or scenario.
        only: names of strategies and backends that are searched alone.
        without: names of strategies and backends that are left out.
        jobs: worker processes; None: one a usable core.

    Returns:
        A row for each of the best layouts of each question, the best first: ``strategy``, ``mesh``,
        ``backend``, ``step_time_s`` with its interval, ``peak_memory_bytes`` and more; ``tie`` where its time
        cannot be told from the shortest. A question whose layouts all need too much memory has none.

    Raises:
        UserError: something is unknown or missing, or no layout is possible.
    """
    from pandas import DataFrame

    from spbench.bench.tools.choose.layout_search import answered
    from spbench.bench.tools.choose.question import question
    from spbench.bench.tools.choose.subject import Asked

    lengths, ranks = ([each] if each is None or isinstance(each, int) else each for each in (seq_len, gpus))
    questions = [
        question(
            model,
            Asked(cluster, n, None, {} if length is None else {"seq_len": length}),
            batch_tokens,
            only,
            without,
        )
        for length in lengths
        for n in ranks
    ]
    return DataFrame(line for answer in answered(questions, jobs) for line in answer.table())


@dataclass(frozen=True)
class MeasuredStep:
    """The measurement of a user's step on a cluster.

    Attributes:
        classes: the traces, by classes of ranks that run the same program.
    """

    classes: StepTraces

    @property
    def cell(self) -> Cell:
        """The cell of the row."""
        return self.classes.cell

    @property
    def timeline(self) -> Timeline:
        """The simulated step of all ranks; UserError if messages of ranks never meet, with the lines."""
        return self.classes.timeline

    def held(self) -> list[dict[str, Any]]:
        """What is alive at the peak of the fullest rank, the largest first: ``bytes``, number of ``tensors``,
        their ``kind`` and the ``place``, the user's module and line that made them."""
        return self.classes.held()

    @cached_property
    def measurement(self) -> Measurement:
        """Memory, communication and, if the cluster has rates and the step fits, the simulated time."""
        return self.classes.measurement()

    @property
    def row(self) -> Row:
        """The result row, as of a cell that a sweep has run."""
        from spbench.bench.measure import row_of

        return row_of(self.cell, self.measurement)

    def keep(self, folder: Path) -> Path:
        """Add the row to the results of a folder, in place of the step's earlier row there; returns the
        file."""
        with ResultsFile(folder) as results:
            results.append(self.row)
        return folder / RESULTS_FILE

    @property
    def verdict(self) -> Certainty | None:
        """Whether the step fits its cards, and why it is tight; None: the cluster's card has no limit."""
        from spbench.bench.measure import certainty

        return certainty(self.cell, self.measurement.as_dict())

    def on(self, cluster: str) -> MeasuredStep:
        """The same step on another cluster, from the same traces."""
        return replace(self, classes=self.classes.on(cluster))

    def fits(self, cluster: str | None = None) -> bool:
        """Whether the step fits the cards of a cluster; None: of its own. :attr:`verdict` says how surely."""
        verdict = (self if cluster is None else self.on(cluster)).verdict
        return verdict is None or verdict.word != "no"


def measure_step(
    step: str | Callable[[], Callable[[], object]],
    *,
    world_size: int,
    cluster: str,
    ranks: Iterable[int] | None = (),
) -> MeasuredStep:
    """Measure a training step of your own, one of many fake ranks, as `spbench trace FILE.py:FUNCTION`.

    Args:
        step: a function that builds model, optimizer and inputs with torch only, and returns a callable that
            does one training step; or "FILE.py:FUNCTION".
        world_size: the number of ranks.
        cluster: the name or file of the cluster.
        ranks: ranks that are traced in addition to those that tell which ranks run the same program; None:
            all.

    Returns:
        ``measurement`` and ``row`` as of a cell, ``verdict`` and ``fits(cluster)``, ``held()`` (what is alive
        at the peak), ``timeline``, and ``keep(folder)``, which adds the row to a folder of results.

    Raises:
        UserError: the step raises an error, or cannot be traced; the message names the line.
    """
    from spbench.bench.measure import step_cell, step_traces

    cell = step_cell(step, world_size, cluster)
    return MeasuredStep(step_traces(cell, None if ranks is None else [*ranks], step))


def read_results(path: str | PathLike[str]) -> DataFrame:
    """The rows that a run has kept, in the columns of :func:`run`.

    Args:
        path: a results file, or the folder that has it.

    Lines that are not rows are left out, with a warning.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = file / RESULTS_FILE
    if not file.exists():
        raise UserError(f"no results file {file}; give the output folder of a run")
    rows, problems = read_rows(file)
    _warn(problems)
    return as_frame(rows)


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)


def verify(
    strategies: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    dtypes: Sequence[str] = ("fp64",),
    parts: Sequence[str] | None = None,
    backend: str = DEFAULT_BACKEND,
) -> DataFrame:
    """Compare strategies with the single-device model on real ranks of this machine: outputs and every
    gradient on every rank, in float64.

    Args:
        strategies: by name; None: all, each alone. Names with plus signs are strategies around each other, as
            "megatron_sp+ulysses".
        models: by name; None: all tiny ones.
        world_sizes: ranks; of strategies around each other split over their axes in every way.
        dtypes: of the checked run: fp64, fp32, bf16, fp16.
        parts: of the models; None: all.
        backend: the data-parallel backend that sums gradients.

    Returns:
        A row for each case, with the fields of :class:`VerifyRow`: ``status`` is green, RED or unsupported,
        ``error`` the relative error of the worst tensor and ``limit`` what it may be.

    Raises:
        UserError: something is unknown.
    """
    from pandas import DataFrame

    from spbench.bench.measure import verify_cases

    try:
        rows = list(verify_cases(strategies, models, world_sizes, dtypes, parts, backend=backend))
    except (KeyError, ValueError) as error:
        raise UserError(str(error.args[0])) from error
    return DataFrame([asdict(row) for row in rows])
