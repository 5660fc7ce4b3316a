"""The reproduction of a paper: run its scenarios' cells, and compare each published number with ours."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pandas import DataFrame, concat

from spbench.bench import measure
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import SweepProgress, message
from spbench.bench.command_line.scenario_run import RanScenario, run_cells
from spbench.bench.errors import UserError
from spbench.bench.measurement import filled
from spbench.bench.row import check_same_code, finite
from spbench.bench.tools.papers import comparison
from spbench.bench.tools.papers.answer import set_beside
from spbench.bench.tools.papers.comparison import draw, draw_figure
from spbench.bench.tools.papers.document import write_documents
from spbench.bench.tools.papers.paper_findings import PaperFindings
from spbench.bench.tools.papers.past_errors import orders_by_scenario
from spbench.bench.tools.papers.sources import Paper, one_of

FOLDER = Path("results", "reproduction")
#: where results go without --write if git tracks :data:`FOLDER`
UNFOLLOWED = Path("results", "runs", "reproduction")
_STATUSES = ("ok", "oom", "unsupported", "failed")
#: columns of PAPER_runs.csv; cell_seconds is the sum over cells, however many ran at a time
RUNS = ("scenario", "cells", *_STATUSES, "cell_seconds", "torch", "commit")


@dataclass(frozen=True)
class Reproduction:
    """The request of `spbench reproduce`, and where cells run.

    Attributes:
        paper: the paper's name; PAPER/SCENARIO runs only that scenario and keeps the files' other lines.
        output: folder of the CSV files and figures.
        write: update the generated parts of REPRODUCE.md and of the paper's page of details.
        crew: the workers; None: each run starts its own.
        executor: runs cells that need nothing of this machine; None: this machine does.
    """

    paper: str
    output: Path
    all_variants: bool = False
    jobs: int | None = None
    fresh: bool = False
    write: bool = False
    crew: measure.Crew | None = None
    executor: measure.Executor | None = None

    @property
    def asked(self) -> tuple[str, str]:
        """(name of the paper, name of the one scenario or "").

        Raises:
            UserError: PAPER/ names no scenario, or all/SCENARIO names no paper; says what to write.
        """
        paper, slash, scenario = self.paper.partition("/")
        if slash and not scenario:
            raise UserError(
                f"{self.paper!r} names no scenario; write {paper} for all of its scenarios, or one of them"
            )
        if slash and paper == "all":
            raise UserError(f"{self.paper!r}: a scenario answers to one paper; write PAPER/{scenario}")
        return paper, scenario

    def run(
        self,
        scenario: measure.Scenario,
        narrowing: measure.Narrowing | None = None,
        below: str = "",
        watch: SweepProgress | None = None,
    ) -> RanScenario:
        """Run a scenario's cells; the rows are kept with those of `spbench run`, or below another output.

        Args:
            below: a folder for rows of other cells than those of the scenario's file.
            watch: see :func:`run_cells`.
        """
        places = self.jobs, self.fresh, self.crew, self.executor
        folder = self._runs / below / scenario.name
        return run_cells(scenario, narrowing or measure.Narrowing(), folder, *places, watch=watch)

    @property
    def _runs(self) -> Path:
        return (Path("results") if self.output in (FOLDER, UNFOLLOWED) else self.output) / "runs"

    def left(self, scenario: measure.Scenario, narrowing: measure.Narrowing) -> int:
        """The number of a scenario's cells that still must run."""
        rows = [] if self.fresh else measure.read_rows(self._runs / scenario.name)[0]
        kept, digest_of = {row.key: row for row in rows}, measure.digests_of_a_run()
        cells = narrowing.cells(scenario)
        return sum(not measure.is_final(cell, kept.get(cell.key), digest_of) for cell in cells)

    def earlier(self, file: str) -> Path:
        """The path of a file of an earlier reproduction: in the output, or else, for :data:`UNFOLLOWED`, the
        committed file."""
        path = self.output / file
        return FOLDER / file if self.output == UNFOLLOWED and not path.exists() else path


def reproduce_paper(request: Reproduction, paper: Paper, scenarios: Sequence[measure.Scenario]) -> Output:
    """Run the cells of a paper's scenarios, or of the one that is asked for, and write PAPER.csv,
    PAPER_runs.csv and figures; with ``write`` also the documents.

    Raises:
        UserError: a file cannot be written, or :func:`check_same_code` refuses the results.
    """
    narrowing = measure.Narrowing(variant="all" if request.all_variants else None)
    one = request.asked[1]
    asked = [one_of(paper, scenarios, one)] if one else scenarios
    all_ran: dict[str, RanScenario] = {}
    files: list[Path] = []
    of_scenarios: list[DataFrame] = []
    failed = False
    with SweepProgress(sum(request.left(each, narrowing) for each in asked)) as watch:
        for scenario in asked:
            all_ran[scenario.name] = request.run(scenario, narrowing, watch=watch)
            if request.write:
                check_same_code({name: each.rows for name, each in all_ran.items()})
    for scenario in asked:
        ran = all_ran[scenario.name]
        comparisons, _ = set_beside(scenario, ran)
        of_scenarios.append(records_of(scenario, ran, comparisons))
        drawn, figure_failed = draw_figure(scenario, ran, comparisons, request.output / "figures")
        files += drawn
        failed = ran.failed() or figure_failed or failed
    records = comparison.joined(of_scenarios)
    # leave out our own closed forms (sent_bytes), which nobody has published
    records = records[records["quantity"] != "sent_bytes"]
    runs = DataFrame([run_record(name, ran) for name, ran in all_ran.items()], columns=list(RUNS))
    if one:
        names = [each.name for each in scenarios]
        of_paper, of_runs = (request.earlier(f"{paper.name}{kind}.csv") for kind in ("", "_runs"))
        records = _in_order(
            names, records, comparison.read_comparisons(of_paper) if of_paper.exists() else records[:0]
        )
        other_runs = comparison.read_records(of_runs) if of_runs.exists() else []
        runs = _in_order(names, runs, DataFrame(other_runs, columns=list(RUNS)))
        for name in _out_of_date(scenarios, records):
            message(
                f"spbench: {paper.name}/{name} has changed since it was run, and its numbers here are"
                f" older; `spbench reproduce {paper.name}/{name}` runs it again"
            )
    documents = {scenario.name: scenario.document for scenario in scenarios}
    orders = orders_by_scenario(scenarios, records)
    findings = PaperFindings(paper.name, records, comparison.as_lines(runs, RUNS), documents, orders)
    tables = [
        comparison.write_csv(records[[*comparison.RECORDS]], request.output / f"{paper.name}.csv"),
        comparison.write_csv(runs, request.output / f"{paper.name}_runs.csv"),
    ]
    if request.write:
        tables += write_documents(findings)
    drawn, figure_failed = draw(paper.name, [], records[[*comparison.RECORDS]], request.output / "figures")
    return _report(paper, asked, findings, [*tables, *files, *drawn], int(failed or figure_failed))


def records_of(
    scenario: measure.Scenario, ran: RanScenario, comparisons: Sequence[comparison.Comparison]
) -> DataFrame:
    """The lines of PAPER.csv from a scenario's run. A claim counts as a table of one number with the claim's
    name."""
    records = []
    for entry in comparisons:
        row, texts = ran.known.get(entry.cell), {}
        measurement = {} if row is None else row["measurement"]
        if comparison.is_time(entry.quantity):
            texts = {name: measurement.get(name, "") for name in comparison.OF_TIMES}
            share = measure.unknown_share(measurement)
            texts[comparison.UNKNOWN] = f"{share:.3g}" if share else ""
        if entry.status_published and (part := filled(measurement)):
            texts[comparison.FILLED] = f"{part:.6g}"
        records.append(replace(entry, table=entry.table or entry.claim, scenario=scenario.name, **texts))
    return comparison.frame_of(records)


def _in_order(scenarios: Sequence[str], mine: DataFrame, others: DataFrame) -> DataFrame:
    """The lines ``mine``, and ``others`` of scenarios that ``mine`` lacks, ordered by ``scenarios``."""
    lines = concat([mine, others[~others["scenario"].isin(mine["scenario"])]], ignore_index=True)
    lines = lines[lines["scenario"].isin(scenarios)]
    return lines.sort_values("scenario", key=lambda of: of.map(scenarios.index), kind="stable")


def _out_of_date(scenarios: Sequence[measure.Scenario], records: DataFrame) -> Iterator[str]:
    """The names of scenarios whose records have a cell that the scenario no longer has."""
    for scenario in scenarios:
        cells = {cell.key for cell in measure.Narrowing(variant="all").declared(scenario)}
        mine = records.loc[records["scenario"] == scenario.name, "cell"].str.split(" / ").explode()
        if not mine.isin([*cells, ""]).all():
            yield scenario.name


def run_record(scenario: str, ran: RanScenario) -> dict[str, str]:
    """A line of PAPER_runs.csv, as texts."""
    counts = Counter(row["status"] for row in ran.rows)
    counts["failed"] = counts.total() - sum(counts[status] for status in _STATUSES[:-1])
    seconds = round(sum(row.get("elapsed_s") or 0 for row in ran.rows))
    made_by = [row.get("provenance") or {} for row in ran.rows]
    versions = (" ".join(sorted({str(by[n]) for by in made_by if by.get(n)})) for n in ("torch", "commit"))
    numbers = (len(ran.rows), *(counts[status] for status in _STATUSES), seconds)
    return dict(zip(RUNS, (scenario, *map(str, numbers), *versions), strict=True))


def _report(
    paper: Paper,
    scenarios: Sequence[measure.Scenario],
    findings: PaperFindings,
    files: Sequence[Path],
    code: int,
) -> Output:
    details = [
        Table(f"{scenario.name}: {title}", lines, below=("note",))
        for scenario in scenarios
        for title, lines in findings.blocks(scenario.name)
    ]
    *verdict, of_all = findings.verdict()
    # a terminal only counts lines without a published number
    unpublished = {at: line["errors"] for at, line in enumerate(verdict) if not line["numbers"]}
    important = ("scenario", "compared", "errors", "numbers", "variant", "statuses right")
    table = Table("Verdict", verdict, important, ("errors",), unpublished)
    records = comparison.as_lines(findings.records)
    content = {"paper": paper.name, "records": records, "runs": findings.runs}
    if findings.orders:
        content["orders"] = [line for lines in findings.orders.values() for line in lines]
    content["files"] = [str(path) for path in files]
    counts = {status: sum(int(run[status]) for run in findings.runs) for status in _STATUSES}
    cells = sum(int(run["cells"]) for run in findings.runs)
    statuses = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    return Output(
        [f"{paper.title} ({paper.source})", table],
        finite(content),
        records,
        comparison.RECORDS,
        notes=[f"{cells} cells: {statuses}", f"{paper.name}: {of_all['errors']}"],
        files=files,
        code=code,
        details=details,
    )
