"""`spbench reproduce`: every scenario of a paper, each published number beside ours.

Writes, into the output folder, PAPER.csv (RECORDS: one line a number), PAPER_runs.csv (RUNS: one line a
scenario) and figures/. Where git follows results/reproduction, they go below results/runs, unless --write
asks for them anew. Cells are kept in results/runs, where `spbench run` keeps them too, so that a
command that was interrupted goes on where it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.command_line.options import executor, fresh, jobs, path_option, printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.tools.papers.execution import Ran, draw_figure, draw_records, opened_executor, run_cells
from spbench.bench.tools.papers.reproduce_cases import run_cases
from spbench.bench.tools.papers.reproduce_request import FOLDER, UNFOLLOWED, Reproduction, default_output
from spbench.bench.tools.papers.reproduce_times import fit_bands, run_without_rates

if TYPE_CHECKING:
    from spbench.bench.measure.scenarios.scenario import Scenario
    from spbench.bench.measure.sweep.executor import Executor
    from spbench.bench.measure.sweep.worker import Crew
    from spbench.bench.tools.papers.paper_findings import Findings
    from spbench.bench.tools.papers.sources import Paper

#: columns of PAPER_runs.csv; cell_seconds is the sum over cells, however many ran at a time
RUNS = ("scenario", "cells", "ok", "oom", "unsupported", "failed", "cell_seconds", "torch", "commit")


@click.command("reproduce")
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Every variant of the scenarios' settings, not the first.")
@jobs
@executor
@path_option(
    "--output",
    "Folder for results; default results/reproduction, or results/runs/reproduction where git follows that "
    "and --write is not given.",
)
@fresh
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md and its details anew.")
@printed
def command(output: Path | None, **asked: Any) -> Iterator[Output]:
    """Set each published number of a PAPER beside ours.

    Run every scenario of PAPER (rsa, lasp, dsp, measured, field or all); PAPER/SCENARIO runs that one alone,
    and keeps what the files have of the others. `strategies` makes the rows and traces of the strategies'
    pages, `datasheets` times of datasheets alone, `substitutes` times without a rate that is known, `bands`
    fits the intervals of simulated times to these results, and `megatron_cases` predicts what each of
    Megatron-LM's functional tests needs, as it is imported.

    Cells are kept in results/runs: what was interrupted goes on where it was.
    """
    request = Reproduction(output=output or default_output(asked["write"]), **asked)
    request.check()
    if request.output == UNFOLLOWED:
        message(
            f"{FOLDER} is committed here: results go to {UNFOLLOWED}; --write writes the committed ones anew"
        )
    return reproduce(request)


def reproduce(request: Reproduction) -> Iterator[Output]:
    """Reproduce a paper, or all: the report of each as soon as its cells have run. UserError for an unknown
    paper, a wrong scenario, a document that lacks a part, a file that cannot be written, or results that
    :func:`check_same_code` refuses."""
    from spbench.bench.measure.engines.run_cell import run_cell
    from spbench.bench.measure.sweep.worker import Crew
    from spbench.bench.tools.papers.document import check_documents
    from spbench.bench.tools.papers.megatron_cases import CASES
    from spbench.bench.tools.papers.sources import scenarios_of
    from spbench.bench.tools.papers.step_errors import BANDS, WITHOUT_RATES
    from spbench.bench.tools.papers.strategy_traces import STRATEGIES

    papers = (
        [] if request.paper in (STRATEGIES, *WITHOUT_RATES, BANDS, CASES) else scenarios_of(request.asked[0])
    )
    for paper, scenarios in papers if request.write else ():
        check_documents(paper.name, [s.name for s in scenarios])
    with Crew(run_cell) as crew, opened_executor(request.executor) as executor:
        for paper, scenarios in papers:
            yield _run(request, paper, scenarios, crew, executor)
        if request.paper in (STRATEGIES, "all"):
            yield _run_strategies(request, crew, executor)
        for name in WITHOUT_RATES:
            if request.paper in (name, "all"):
                yield run_without_rates(name, request, crew, executor)
        if request.paper in (CASES, "all"):
            yield run_cases(request, crew, executor)
    if request.paper in (BANDS, "all"):
        yield fit_bands(request)


def _run(
    request: Reproduction,
    paper: Paper,
    scenarios: Sequence[Scenario],
    crew: Crew,
    executor: Executor | None,
) -> Output:
    from pandas import DataFrame

    from spbench.bench.measure.scenarios.select import ALL, Narrowing
    from spbench.bench.measure.sweep.provenance import check_same_code
    from spbench.bench.tools.papers.comparison import write_csv
    from spbench.bench.tools.papers.document import write_documents
    from spbench.bench.tools.papers.order_of_splits import orders_by_scenario
    from spbench.bench.tools.papers.paper_findings import RECORDS, Findings, record_of
    from spbench.bench.tools.papers.sources import one_of

    all_ran: dict[str, Ran] = {}
    files: list[Path] = []
    failed = False
    narrowing = Narrowing(variant=ALL if request.all_variants else None)
    one = request.asked[1]
    asked = [one_of(paper, scenarios, one)] if one else scenarios
    for scenario in asked:
        folder = request.runs(scenario)
        ran = run_cells(scenario, narrowing, folder, request.jobs, request.fresh, crew, executor)
        all_ran[scenario.name] = ran
        if request.write:
            check_same_code({name: each.rows for name, each in all_ran.items()})
        drawn, figure_failed = draw_figure(scenario, ran, request.output / "figures")
        files += drawn
        failed = ran.failed() or figure_failed or failed
    # our own closed forms are in comparison.csv too, as sent_bytes: nobody has published them
    records: list[Mapping[str, Any]] = [
        record_of(name, entry, measured.get(entry.cell, {}))
        for name, ran in all_ran.items()
        for measured in [{row["key"]: row["measurement"] for row in ran.known}]
        for entry in ran.comparisons
        if entry.quantity != "sent_bytes"
    ]
    runs: list[Mapping[str, Any]] = [run_record(name, ran) for name, ran in all_ran.items()]
    if one:
        records = _with_others(request.earlier(f"{paper.name}.csv"), scenarios, records)
        runs = _with_others(request.earlier(f"{paper.name}_runs.csv"), scenarios, runs)
        for name in _out_of_date(scenarios, records):
            message(
                f"spbench: {paper.name}/{name} has changed since it was run, and its numbers here are of"
                f" before; `spbench reproduce {paper.name}/{name}` runs it again"
            )
    documents = {scenario.name: scenario.document for scenario in scenarios}
    findings = Findings(paper.name, records, runs, documents, orders_by_scenario(scenarios, records))
    tables = [
        write_csv(DataFrame(lines, columns=list(columns)), request.output / f"{paper.name}{kind}.csv")
        for kind, lines, columns in (("", records, RECORDS), ("_runs", runs, RUNS))
    ]
    if request.write:
        tables += write_documents(findings)
    drawn, figure_failed = draw_records(paper.name, records, request.output / "figures")
    return _report(paper, asked, findings, [*tables, *files, *drawn], int(failed or figure_failed))


def _with_others(
    path: Path, scenarios: Sequence[Scenario], lines: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The lines of some scenarios, and those that the file has of the paper's other ones, in their order."""
    from spbench.bench.tools.papers.comparison import read_records

    mine = {line["scenario"] for line in lines}
    others = read_records(path) if path.exists() else []
    lines = [*lines, *(line for line in others if line["scenario"] not in mine)]
    return [line for scenario in scenarios for line in lines if line["scenario"] == scenario.name]


def _out_of_date(scenarios: Sequence[Scenario], records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The names of scenarios of which there are records of cells that they do not have."""
    from spbench.bench.measure.scenarios.select import ALL, Narrowing, declared_cells

    for scenario in scenarios:
        cells = {cell.key for cell in declared_cells(scenario, Narrowing(variant=ALL))}
        mine = (line["cell"] for line in records if line["scenario"] == scenario.name)
        if any(key and key not in cells for of_record in mine for key in of_record.split(" / ")):
            yield scenario.name


def _run_strategies(request: Reproduction, crew: Crew, executor: Executor | None) -> Output:
    """Run the scenarios of the strategies' pages, and keep their rows and traces."""
    from spbench.bench.measure.scenarios.select import Narrowing
    from spbench.bench.tools.papers.answer import load_scenario
    from spbench.bench.tools.papers.strategy_traces import LAYERS, SIDE_BY_SIDE, STRATEGIES, write_kept

    ran = {}
    for scenario in map(load_scenario, (SIDE_BY_SIDE, LAYERS)):
        asked = request.runs(scenario), request.jobs, request.fresh
        ran[scenario.name] = run_cells(scenario, Narrowing(), *asked, crew, executor)
    files = write_kept({name: one.rows for name, one in ran.items()}, request.output / STRATEGIES)
    code = max(int(one.failed()) for one in ran.values())
    lines = [{"file": str(path)} for path in files]
    return Output([Table("Strategies beside each other", lines)], {"files": lines}, files=files, code=code)


def run_record(scenario: str, ran: Ran) -> dict[str, str]:
    """A line of PAPER_runs.csv, as texts."""
    counts = Counter(row["status"] for row in ran.rows)
    failed = sum(counts[status] for status in counts.keys() - {"ok", "oom", "unsupported"})
    seconds = round(sum(row.get("elapsed_s") or 0 for row in ran.rows))
    made = [row.get("provenance") or {} for row in ran.rows]
    versions = (" ".join(sorted({str(by[n]) for by in made if by.get(n)})) for n in ("torch", "commit"))
    numbers = (len(ran.rows), *(counts[s] for s in ("ok", "oom", "unsupported")), failed, seconds)
    return dict(zip(RUNS, (scenario, *map(str, numbers), *versions), strict=True))


def _report(
    paper: Paper, scenarios: Sequence[Scenario], findings: Findings, files: Sequence[Path], code: int
) -> Output:
    from spbench.bench.measure.sweep.results import finite
    from spbench.bench.tools.papers.paper_findings import RECORDS

    details = [
        Table(f"{scenario.name}: {title}", lines, below=("note",))
        for scenario in scenarios
        for title, lines in findings.blocks(scenario.name)
    ]
    *verdict, of_all = findings.verdict()
    sections: list[Table | str] = [f"{paper.title} ({paper.source})", _verdict_table(verdict)]
    content = {"paper": paper.name, "records": findings.records, "runs": findings.runs}
    if findings.orders:
        content["orders"] = [line for lines in findings.orders.values() for line in lines]
    content["files"] = [str(path) for path in files]
    notes = [*_cells(findings.runs), f"{paper.name}: {of_all['errors']}"]
    return Output(
        sections,
        finite(content),
        findings.records,
        RECORDS,
        notes=notes,
        files=files,
        code=code,
        details=details,
    )


def _verdict_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Of what was compared; a terminal counts what nothing is published of."""
    unpublished = {at: line["errors"] for at, line in enumerate(lines) if not line["numbers"]}
    important = ("scenario", "compared", "errors", "numbers", "variant", "statuses right")
    return Table("Verdict", lines, important, ("errors",), unpublished)


def _cells(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How many cells came out how, in a line, as RUNS has them as texts."""
    statuses = ("ok", "oom", "unsupported", "failed")
    counts = {status: sum(int(run[status]) for run in runs) for status in statuses}
    total = sum(int(run["cells"]) for run in runs)
    yield f"{total} cells: {', '.join(f'{n} {status}' for status, n in counts.items() if n)}"
