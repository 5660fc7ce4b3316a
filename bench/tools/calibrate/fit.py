"""Calibration: fit a cluster's few scalars to some published cells, and check the scalars on the other cells.

Each scalar is fitted on rows of its own, so that the mean of log(simulated / published step time) over these
rows is zero; the step time is monotonic in each scalar. The fits are repeated until no scalar moves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import scipy  # whose parts, a second of imports, are imported as they are first used
import torch

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.command_line.progress import message
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.errors import UserError, refuse_unknown
from spbench.bench.measure import Calibration, Narrowing, Scenario, Simulator, load_cluster, trace_classes
from spbench.bench.tools.papers.answer import answers_of, load_scenario
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.selector import PublishedRow, QuantityColumn
from spbench.impls import model_preset

TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))
#: the least and the largest reasonable value of each scalar; efficiencies are shares, costs are seconds
BOUNDS: Mapping[str, Sequence[float]] = TABLES.forms["bounds"]
#: the most rounds of all fits, and the tolerance of a fit in the logarithm of its scalar
_ROUNDS, _ARRIVED = 30, 1e-10
#: the rounds end once each scalar's relative change is below this
_SETTLED = 1e-4


@dataclass(frozen=True)
class Fit:
    """A scalar, and the values of columns that choose the rows of a table on which the scalar is fitted."""

    scalar: str
    rows: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The fit in a text ``scalar:column=value,column=value``; UserError for another form or scalar."""
        scalar, _, conditions = text.partition(":")
        refuse_unknown(f"--fit {text}: unknown scalar", scalar, BOUNDS)
        pairs = [condition.partition("=") for condition in conditions.split(",") if condition]
        if not pairs or any(not equals for _, equals, _ in pairs):
            raise UserError(f"--fit {text}: write SCALAR:COLUMN=VALUE[,COLUMN=VALUE...]")
        return cls(scalar, {column.strip(): value.strip() for column, _, value in pairs})


@dataclass(frozen=True)
class Known:
    """A traced cell with its published step time in seconds, which can be simulated under any calibration."""

    row: PublishedRow
    cell: Cell
    published_s: float
    simulator: Simulator

    def log_error(self, calibration: Calibration) -> float:
        """log(simulated / published step time) of the cell under a calibration."""
        return math.log(self.simulator(calibration).step_time_s / self.published_s)


def known_cells(scenario: Scenario, table: PublishedTable, quantity: str) -> list[Known]:
    """The cells of a published table that have a number in the column ``quantity`` (a step time, or tokens or
    samples per second), traced on virtual ranks."""
    cells = Narrowing().declared(scenario)
    known = []
    for row, matched in table.matched(table.rows(scenario.path.parent), cells):
        published = row.value(quantity)
        if published is None or not matched:
            continue
        cell = matched[0]
        message(f"tracing {cell.key}")
        simulator = trace_classes(cell, events=True).simulator()
        seconds = _published_seconds(cell, table.quantities[quantity], published)
        known.append(Known(row, cell, seconds, simulator))
    return known


def _published_seconds(cell: Cell, quantity: QuantityColumn, published: float) -> float:
    """A cell's step time in seconds, from the published number."""
    if quantity.field == "step_time_s":
        return published * (quantity.published_unit or quantity.unit)
    if quantity.field == "samples_per_s":
        return cell.shape[0] / published
    return model_preset(*cell.model_arguments).tokens(*cell.shape) / published


def chosen(fit: Fit, known: Sequence[Known]) -> list[Known]:
    """The known cells in a fit's rows; UserError if there are none, or the fit names an unknown column."""
    for column in fit.rows if known else ():
        refuse_unknown(f"--fit {fit.scalar}: no column", column, known[0].row.text)
    cells = [k for k in known if all(k.row.text[c] == value for c, value in fit.rows.items())]
    if not cells:
        where = ", ".join(f"{c}={value}" for c, value in fit.rows.items())
        raise UserError(f"--fit {fit.scalar}: no row with a published throughput has {where}")
    return cells


def fitted(fits: Sequence[Fit], known: Sequence[Known], without: Known | None = None) -> Calibration:
    """The calibration by all fits, done one after the other; scalars that no fit names keep the values of the
    cells' cluster. ``without``: a cell on which nothing is fitted. UserError if a fit has no rows."""
    chosen(fits[0], known)
    cell = known[0].cell
    before_fits = load_cluster(cell.cluster).calibration_of(cell.precision)
    named = {fit.scalar for fit in fits}
    kept = {name: value for name, value in before_fits.scalars.items() if name not in named}
    values: dict[str, Any] = dict(kept)
    for _ in range(_ROUNDS):
        before = dict(values)
        for fit in fits:
            cells = [k for k in chosen(fit, known) if k is not without]
            if cells:
                values[fit.scalar] = _root(fit.scalar, cells, values)
        if before.keys() == values.keys() and all(
            math.isclose(values[s], before[s], rel_tol=_SETTLED) for s in values
        ):
            break
    names = dict.fromkeys(before_fits.fitted_on if kept else ())
    names |= dict.fromkeys(k.cell.key for fit in fits for k in chosen(fit, known) if k is not without)
    return Calibration(**values, fitted_on=list(names))


def _root(scalar: str, cells: Sequence[Known], values: Mapping[str, Any]) -> float:
    """The value of the scalar at which the cells' mean error is zero; if there is none, the nearer bound."""

    def error(at: float) -> float:
        calibration = Calibration(**{**values, scalar: math.exp(at)})
        return sum(k.log_error(calibration) for k in cells) / len(cells)

    a, b = (math.log(bound) for bound in BOUNDS[scalar])
    error_a, error_b = error(a), error(b)
    if error_a * error_b > 0:
        return math.exp(a if abs(error_a) < abs(error_b) else b)
    return math.exp(scipy.optimize.brentq(error, a, b, xtol=_ARRIVED))


def residuals(
    fits: Sequence[Fit], cells: Sequence[Known], table: PublishedTable, quantity: str
) -> list[dict[str, Any]]:
    """The residual of every known cell under the calibration by all fits; UserError if a fit has no rows.

    Returns:
        For each cell its ``label``; ``published_s`` and ``simulated_s``, step times in seconds;
        ``relative_error``, simulated / published - 1; the ``role``, "calibrated" if a scalar was fitted on
        the cell, else "held out"; ``left_out``, the error under fits without the cell, None for a cell of no
        fit that has several cells.
    """
    calibration = fitted(fits, cells)
    shared = [k for fit in fits if len(chosen(fit, cells)) > 1 for k in chosen(fit, cells)]
    lines = []
    for k in cells:
        simulated = k.simulator(calibration).step_time_s
        left_out = math.expm1(k.log_error(fitted(fits, cells, without=k))) if k in shared else None
        role = "calibrated" if k.cell.key in calibration.fitted_on else "held out"
        line = {"label": table.label(k.row, quantity), "published_s": k.published_s, "simulated_s": simulated}
        line["relative_error"] = simulated / k.published_s - 1
        lines.append({**line, "role": role, "left_out": left_out})
    return lines


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """The median and the largest error of the cells on which nothing was fitted, in one line."""
    errors = [abs(line["relative_error"]) for line in lines if line["role"] == "held out"]
    return TABLES.text("held out", errors=errors, median=median(errors or [0.0]))


def profile(calibration: Calibration, precision: str) -> Verbatim:
    """The lines of a calibration, for the user to copy into the cluster's file."""
    return Verbatim(TABLES.document("profile", calibration=calibration, precision=precision))


def fitted_to_published(scenario: str, table: str, quantity: str, fits: Sequence[str]) -> Output:
    """The output of `spbench calibrate --scenario`: the scalars of ``fits`` and the errors of all rows.

    Raises:
        UserError: the scenario has no such table, the table has no such quantity, or a fit has no rows.
    """
    loaded = load_scenario(scenario)
    parsed = [Fit.parse(text) for text in fits]
    tables = {declared.table: declared for declared in answers_of(loaded, PublishedTable)}
    refuse_unknown(f"{loaded.path}: no table", table, tables)
    if quantity not in tables[table].quantities:
        raise UserError(f"{loaded.path}: table {table} has no quantity {quantity!r}")
    torch.set_num_threads(1)
    known = known_cells(loaded, tables[table], quantity)
    calibration = fitted(parsed, known)
    lines = residuals(parsed, known, tables[table], quantity)
    title = "Step times in seconds, published and simulated (error: simulated / published - 1)"
    return Output(
        [TABLES.table("fitted", title, lines), summary(lines), profile(calibration, known[0].cell.precision)],
        {"calibration": calibration.model_dump(exclude_defaults=True), "residuals": lines},
        lines,
    )
