"""`spbench reproduce megatron_cases`: Megatron-LM's functional tests as they are imported, and how far their
predictions are from the golden values at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spbench.bench.command_line.output import Output, Table
from spbench.bench.tools.papers.execution import run_cells

if TYPE_CHECKING:
    from spbench.bench.measure.sweep.executor import Executor
    from spbench.bench.measure.sweep.worker import Crew
    from spbench.bench.tools.papers.reproduce_request import Reproduction


def run_cases(request: Reproduction, crew: Crew, executor: Executor | None) -> Output:
    """Run the cells of all cases, each once, and write megatron_cases.csv and megatron_cases_errors.csv."""
    from pandas import DataFrame

    from spbench.bench.measure.scenarios.select import Narrowing
    from spbench.bench.tools.papers.comparison import write_csv
    from spbench.bench.tools.papers.megatron_cases import (
        CASES,
        ERRORS,
        PREDICTIONS,
        cases,
        errors,
        predictions,
        scenario_of,
        summary,
    )

    found = cases()
    scenario = scenario_of(found)
    folder = request.runs(scenario)
    ran = run_cells(scenario, Narrowing(), folder, request.jobs, request.fresh, crew, executor)
    lines = list(predictions(found, {row["key"]: row for row in ran.known}))
    compared = list(errors(lines))
    files = [
        write_csv(DataFrame(rows, columns=list(columns), dtype=object), request.output / f"{name}.csv")
        for name, rows, columns in ((CASES, lines, PREDICTIONS), (f"{CASES}_errors", compared, ERRORS))
    ]
    imported = {line["case"] for line in lines if not line.get("refusal")}
    told = f"{len(imported)} of {len({case.case for case in found})} cases are imported and predicted"
    sizes = list(summary(compared))
    table = Table("Errors of predicted memory, from golden values", sizes)
    content = {"predictions": lines, "errors": compared, "summary": sizes}
    return Output([told, table], content, lines, PREDICTIONS, files=files, code=int(ran.failed()))
