"""`spbench reproduce datasheets`, `substitutes` and `bands`: how far simulated times are from measured ones,
also without rates that are known, and the intervals of other times that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError
from spbench.bench.tools.papers.execution import run_cells

if TYPE_CHECKING:
    from spbench.bench.cell import Cell
    from spbench.bench.measure.sweep.executor import Executor
    from spbench.bench.measure.sweep.worker import Crew
    from spbench.bench.tools.papers.reproduce_request import Reproduction

#: the intervals that the package comes with, below the working directory
PACKAGED = Path("bench", "measure", "trust")
#: below, in a folder of the argument's name, of each scenario that is run so the cluster, SCENARIO.yaml
CLUSTERS = Path("results", "reproduction")


def run_without_rates(name: str, request: Reproduction, crew: Crew, executor: Executor | None) -> Output:
    """Run scenarios on clusters that lack rates, and keep the times beside the published ones in NAME.csv.

    Args:
        name: the folder of the clusters: DATASHEETS, which know no more than that, or SUBSTITUTES, from which
            a rate was taken away, so that something else prices what it is of.
    """
    from pandas import DataFrame

    from spbench.bench.measure.scenarios.scenario import load_scenario
    from spbench.bench.measure.scenarios.select import Narrowing
    from spbench.bench.tools.papers.comparison import write_csv
    from spbench.bench.tools.papers.paper_findings import RECORDS, is_time, record_of
    from spbench.bench.tools.papers.step_errors import WITHOUT_RATES

    clusters = sorted((CLUSTERS / name).glob("*.yaml"))
    if not clusters:
        raise UserError(f"no clusters in {CLUSTERS / name}: run it in a checkout")
    records, failed = [], False
    for cluster in clusters:
        scenario = load_scenario(cluster.stem)
        folder = request.runs(scenario).parent / name / scenario.name
        on = Narrowing(clusters=(cluster.as_posix(),))
        ran = run_cells(scenario, on, folder, request.jobs, request.fresh, crew, executor)
        measured = {row["key"]: row["measurement"] for row in ran.known}
        records += [
            record_of(scenario.name, entry, measured.get(entry.cell, {}))
            for entry in ran.comparisons
            if is_time(entry.quantity)
        ]
        failed = ran.failed() or failed
    path = write_csv(DataFrame(records, columns=list(RECORDS)), request.output / f"{name}.csv")
    lines = [{"scenario": each.stem, "cluster": str(each)} for each in clusters]
    title, content = f"Published step times {WITHOUT_RATES[name]}", {"records": records}
    return Output([Table(title, lines)], content, records, RECORDS, files=[path], code=int(failed))


def fit_bands(request: Reproduction) -> Output:
    """Fit the intervals to the files of `spbench reproduce`, and say how many times of each source lie within
    those that the other sources give; and keep the errors of memory. With --write they become those of the
    package, and README.md's."""
    from spbench.bench.files import write_whole
    from spbench.bench.measure.trust.bands import BANDS_FILE, packaged_model
    from spbench.bench.measure.trust.error_model import ErrorModel
    from spbench.bench.measure.trust.errors_of_memory import MEMORY_ERRORS_FILE
    from spbench.bench.tools.papers.document import write_part
    from spbench.bench.tools.papers.files import read_csv
    from spbench.bench.tools.papers.megatron_cases import CASES
    from spbench.bench.tools.papers.memory_errors import memory_errors
    from spbench.bench.tools.papers.paper_findings import markdown
    from spbench.bench.tools.papers.sources import papers
    from spbench.bench.tools.papers.step_errors import (
        BANDS,
        TIMES,
        WITHOUT_RATES,
        counted_times,
        observations,
        time_lines,
        told_observations,
    )

    names = (*papers(), *WITHOUT_RATES)
    files = [path for name in names if (path := request.earlier(f"{name}.csv")).exists()]
    records, cells = counted_times(files), _cells()
    seen = observations(records, cells)
    if not seen:
        raise UserError(f"{request.output} has no times: run spbench reproduce all first")
    model = ErrorModel.fit([*seen, *told_observations()])
    lines = time_lines(records, cells)
    intervals = [
        {"rates": rates, "bound": bound, "interval": f"{low - 1:+.0%} {high - 1:+.0%}", "rests on": words}
        for rates, of_class in model.intervals.items()
        for bound in of_class
        for low, high, words in [model.band(rates, bound, model.strategies[0])]
    ]
    content = json.dumps(model.as_dict(), indent=1) + "\n"
    folder = PACKAGED if request.write else request.output
    scored = request.earlier(f"{CASES}_errors.csv")
    of_cases = read_csv(scored)[1] if scored.exists() else []
    memory = json.dumps(memory_errors(files, cells, of_cases), separators=(",", ":"))
    written = [
        write_whole(folder / BANDS_FILE, content),
        write_whole(folder / MEMORY_ERRORS_FILE, f"{memory}\n"),
    ]
    if request.write:
        written.append(write_part(Path("README.md"), BANDS, TIMES, markdown(lines)))
        packaged_model.cache_clear()
    tables = [
        Table("Published step times, and how many lie within the intervals of the other sources", lines),
        Table("Intervals of a simulated time of 1", intervals),
    ]
    return Output(tables, {"times": lines, "model": model.as_dict()}, lines, files=written)


def _cells() -> Mapping[str, Cell]:
    """The declared cells of the packaged scenarios by key, and those on clusters of :data:`CLUSTERS`."""
    from spbench.bench.measure.scenarios.scenario import load_scenario
    from spbench.bench.measure.scenarios.select import ALL, Narrowing, declared_cells
    from spbench.bench.yaml_files import packaged

    scenarios = [load_scenario(name) for name in packaged("spbench.scenarios")]
    named = [each for each in scenarios if each.document.paper]
    cells = [cell for each in named for cell in declared_cells(each, Narrowing(variant=ALL))]
    for cluster in CLUSTERS.glob("*/*.yaml"):
        on = Narrowing(clusters=(cluster.as_posix(),))
        cells += declared_cells(load_scenario(cluster.stem), on)
    return {cell.key: cell for cell in cells}
