"""What `spbench calibrate` does, once its arguments are read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch

from spbench.bench.calibration.fit import Fit, fitted, known_cells, residuals, summary
from spbench.bench.commands import output as report
from spbench.bench.config.scenario import load_scenario
from spbench.bench.errors import UserError, suggestion


def calibrate_cluster(name: str, table_name: str, quantity: str, fits: Sequence[str], form: str) -> int:
    """Fit and print the scalars of a scenario's cluster; returns the exit code.

    Raises:
        UserError: an unknown table, quantity, scalar or column, or a fit without rows.
    """
    scenario = load_scenario(name)
    parsed = [Fit.parse(text) for text in fits]
    tables = {table.table: table for table in scenario.document.tables}
    if table_name not in tables:
        raise UserError(f"{scenario.path}: no table {table_name!r}{suggestion(table_name, tables)}")
    table = tables[table_name]
    if quantity not in table.quantities:
        raise UserError(f"{scenario.path}: table {table_name} has no quantity {quantity!r}")
    torch.set_num_threads(1)
    known = known_cells(scenario, table, quantity, lambda cell: report.message(f"tracing {cell.key}"))
    calibration = fitted(parsed, known)
    lines = residuals(parsed, known, table, quantity)
    if form == "json":
        content = {"calibration": calibration.model_dump(exclude_defaults=True)}
        print(json.dumps(content | {"residuals": [dataclasses.asdict(line) for line in lines]}, indent=1))
        return 0
    report.show_table(
        "Step times in seconds, published and simulated (error: simulated / published - 1)",
        [
            {
                "cell": line.label,
                "published": f"{line.published_s:.2f}",
                "simulated": f"{line.simulated_s:.2f}",
                "error": f"{line.relative_error:+.1%}",
                "left out": None if line.left_out is None else f"{line.left_out:+.1%}",
                "role": line.role,
            }
            for line in lines
        ],
    )
    print(summary(lines))
    print("\nfor the cluster's profile:")
    print(f"calibration:\n  {known[0].cell.precision}:")
    for scalar, value in calibration.scalars.items():
        print(f"    {scalar}: {value:.4g}")
    print("    fitted_on:")
    for key in calibration.fitted_on:
        print(f"      - {key}")
    return 0
