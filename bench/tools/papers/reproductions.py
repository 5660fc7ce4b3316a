"""`spbench reproduce`: papers, pages of strategies, times without rates, intervals, and Megatron-LM's cases.

For the pages of strategies it writes rows of two scenarios, and traces of a layer, for the report.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pandas import concat

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.git import asked as asked_git
from spbench.bench.row import Row, json_line
from spbench.bench.tools.papers import document, past_errors
from spbench.bench.tools.papers.answer import load_scenario, set_beside
from spbench.bench.tools.papers.comparison import RECORDS, as_lines, joined, read_csv, write_csv
from spbench.bench.tools.papers.error_fits import fit
from spbench.bench.tools.papers.megatron_cases import CASES, EXPERT_CASES, of_all_machines, predicted_cases
from spbench.bench.tools.papers.paper_findings import TABLES
from spbench.bench.tools.papers.reproduction import (
    FOLDER,
    UNFOLLOWED,
    Reproduction,
    records_of,
    reproduce_paper,
)
from spbench.bench.tools.papers.sources import ALL, papers, scenarios_of
from spbench.bench.tools.papers.validation import certainty_lines, filled_runs, memory_errors
from spbench.bench.yaml_files import packaged

#: the argument of `spbench reproduce` for pages of strategies, and their folder
STRATEGIES = "strategies"
#: the two scenarios of these pages; the cells of the second are also traced
SIDE_BY_SIDE, LAYERS = "side_by_side", "layers"

_KEPT = ("key", "cell", "status", "reason", "measurement", "digest", "time")
_PROVENANCE = ("commit", "torch")


def write_kept(rows: Mapping[str, Sequence[Row]], folder: Path) -> list[Path]:
    """Write the rows of both scenarios, in their order, without fields that depend on the machine that ran,
    and the traces of the cells of :data:`LAYERS` that ran. UserError if a file cannot be written; an earlier
    file is unchanged."""
    files = []
    for name, some in rows.items():
        lines = []
        for row in some:
            made_by = {key: (row.get("provenance") or {}).get(key) for key in _PROVENANCE}
            kept = {key: row[key] for key in _KEPT if key in row} | {"provenance": made_by}
            lines.append(json_line(kept, sort_keys=True))
        files.append(write_whole(folder / name / measure.RESULTS_FILE, "".join(lines)))
    cells = [Cell.model_validate(row["cell"]) for row in rows[LAYERS] if row["status"] in ("ok", "oom")]
    return files + [write_trace(cell, folder) for cell in cells]


def trace_path(folder: Path, cell: Cell) -> Path:
    """The path of the trace of a cell's layer; the strategy and its options are in the name."""
    chosen = (str(value) for _, value in sorted(cell.strategy_options.items()))
    return folder / LAYERS / f"{'-'.join([cell.strategy, *chosen])}.json.gz"


def write_trace(cell: Cell, folder: Path) -> Path:
    """Simulate a step of a cell, and write the trace of all of its ranks, compressed.

    ``otherData`` has the cell's key, the step time, and each rank's seconds by kind of work. Unsupported if
    the strategy cannot run the cell. UserError if the file cannot be written."""
    timeline = measure.trace_classes(cell, events=True).simulator()()
    ranks = range(timeline.world_size)
    by_rank = [timeline.breakdown_of(rank) for rank in ranks]
    about = {"cell": cell.key, "step_time_s": timeline.step_time_s, "by_rank": by_rank}
    return timeline.export(trace_path(folder, cell), ranks, **about)


def read_trace(folder: Path, cell: Cell) -> Mapping[str, Any] | None:
    """The trace of a cell's layer; None: there is none for this cell, or it cannot be read."""
    try:
        content = json.loads(gzip.decompress(trace_path(folder, cell).read_bytes()))
        is_its = {"otherData", "traceEvents"} <= content.keys() and content["otherData"]["cell"] == cell.key
        return content if is_its else None
    except (OSError, EOFError, ValueError, AttributeError, KeyError, TypeError):
        return None


#: the folder of the package's intervals, below the working directory
PACKAGED = Path("bench", "measure", "trust")
#: the argument of `spbench reproduce` that fits the intervals
BANDS = "bands"


def reproduce(output: Path | None, executor: str | None, **asked: Any) -> Iterator[Output]:
    """Yield the outputs of `spbench reproduce`, whose options are the arguments: the report of each paper as
    soon as its cells have run.

    Raises:
        UserError: an unknown paper, a wrong scenario, a document that lacks a part, a file that cannot be
            written, or results that :func:`check_same_code` refuses.
    """
    committed = not asked["write"] and asked_git(Path(), "ls-files", "--", str(FOLDER))
    request = Reproduction(output=output or (UNFOLLOWED if committed else FOLDER), **asked)
    if request.output == UNFOLLOWED:
        message(
            f"{FOLDER} is committed here: results go to {UNFOLLOWED}; --write writes the committed ones anew"
        )
    others: dict[str, Callable[[Reproduction], Output]] = {
        STRATEGIES: _strategies,
        **{name: partial(_without_rates, name) for name in past_errors.WITHOUT_RATES},
        CASES: _cases,
        EXPERT_CASES: lambda request: predicted_cases(request.run, request.output, EXPERT_CASES),
    }
    of_papers = [] if request.paper in (*others, BANDS) else scenarios_of(request.asked[0])
    for paper, scenarios in of_papers if request.write else ():
        document.check_documents(paper.name, [scenario.name for scenario in scenarios])
    with measure.Crew() as crew, measure.executor_at(executor) as there:
        request = replace(request, crew=crew, executor=there)
        for paper, scenarios in of_papers:
            yield reproduce_paper(request, paper, scenarios)
        for name, other in others.items():
            if request.paper in (name, ALL):
                yield other(request)
    if request.paper in (BANDS, ALL):
        yield fit_bands(request)


def _strategies(request: Reproduction) -> Output:
    """Run the scenarios of the strategies' pages, and keep their rows and traces."""
    ran = {name: request.run(load_scenario(name)) for name in (SIDE_BY_SIDE, LAYERS)}
    files = write_kept({name: one.rows for name, one in ran.items()}, request.output / STRATEGIES)
    code = max(int(one.failed()) for one in ran.values())
    lines = [{"file": str(path)} for path in files]
    return Output([Table("Strategies beside each other", lines)], {"files": lines}, files=files, code=code)


def _on_other_clusters(name: str = "*") -> Iterator[tuple[Path, measure.Scenario, measure.Narrowing]]:
    """(file of a cluster that lacks rates, scenario of that name, narrowing of it to the cluster)."""
    for cluster in sorted(FOLDER.glob(f"{name}/*.yaml")):
        yield cluster, load_scenario(cluster.stem), measure.Narrowing(clusters=(cluster.as_posix(),))


def _without_rates(name: str, request: Reproduction) -> Output:
    """Run scenarios on clusters that lack rates, and write their times and the published ones to NAME.csv.

    Args:
        name: the folder of the clusters: DATASHEETS, which have only datasheets, or SUBSTITUTES, which lack
            one rate, so that another rate prices its work.
    """
    records, lines, failed = joined([]), [], False
    for cluster, scenario, narrowing in _on_other_clusters(name):
        ran = request.run(scenario, narrowing, name)
        records = joined([records, records_of(scenario, ran, set_beside(scenario, ran)[0]).query("is_time")])
        failed = ran.failed() or failed
        lines.append({"scenario": scenario.name, "cluster": str(cluster)})
    if not lines:
        raise UserError(f"no clusters in {FOLDER / name}: run it in a checkout")
    path = write_csv(records[[*RECORDS]], request.output / f"{name}.csv")
    written = as_lines(records)
    table = Table(f"Published step times {past_errors.WITHOUT_RATES[name]}", lines)
    return Output([table], {"records": written}, written, RECORDS, files=[path], code=int(failed))


def _cases(request: Reproduction) -> Output:
    """Predict the memory of every functional test of Megatron-LM; with --write the page of errors too."""
    output = predicted_cases(request.run, request.output)
    if not request.write:
        return output
    page = document.write_part(
        document.TRUST_PAGE, CASES, "errors", of_all_machines(output.content["summary"])
    )
    return replace(output, files=[*output.files, page, *document.write_shared()])


def fit_bands(request: Reproduction) -> Output:
    """Fit the intervals to the files of `spbench reproduce`, with the number of times of each source within
    the intervals that the other sources give; write intervals, errors of memory and evidence for verdicts.
    With --write these files replace the package's, and the pages that show their numbers are updated."""
    names = (*papers(), *past_errors.WITHOUT_RATES)
    files = [path for name in names if (path := request.earlier(f"{name}.csv")).exists()]
    records, cells = past_errors.counted_times(files), _all_cells() if files else {}
    seen = past_errors.observations(records, cells)
    if seen.empty:
        raise UserError(f"{request.output} has no times: run spbench reproduce all first")
    model = fit(concat([seen, past_errors.grouped_observations()], ignore_index=True))
    lines = past_errors.time_lines(records, cells)
    bounds = {**model.intervals, **dict.fromkeys(model.of_stand_ins, (model.ANY,))}
    intervals = [
        TABLES.record("interval", model.band(rates, bound, model.strategies[0]), rates=rates, bound=bound)
        for rates, of_class in bounds.items()
        for bound in of_class
    ]
    scored = request.earlier(f"{CASES}_errors.csv")
    of_cases = read_csv(scored)[1] if scored.exists() else []
    runs, kinds = filled_runs(files, cells)
    verdicts = certainty_lines(runs, kinds)
    folder = PACKAGED if request.write else request.output
    contents = {
        model.FILE: json.dumps(model.as_dict(), indent=1),
        measure.MEMORY_ERRORS_FILE: json.dumps(memory_errors(files, cells, of_cases), separators=(",", ":")),
        measure.Evidence.FILE: json.dumps(vars(measure.Evidence.of(runs, kinds)), indent=1),
    }
    written = [write_whole(folder / name, f"{text}\n") for name, text in contents.items()]
    if request.write:
        parts = (
            (document.TIMES_PAGE, "times", lines),
            (document.TRUST_PAGE, "classes", past_errors.class_lines(records)),
            (document.TRUST_PAGE, "left-out", past_errors.left_out_lines(records, cells)),
            (document.SUMMARY_PAGE, "certainty", verdicts),
        )
        written += [document.write_part(page, BANDS, name, own) for page, name, own in parts]
        written += document.write_shared()
        measure.packaged_model.cache_clear()
    tables = [
        Table("Published step times, and how many lie within the intervals of the other sources", lines),
        Table("Intervals of a simulated time of 1", intervals),
        Table("Verdicts on the memory of published runs, each by the other sources' runs", verdicts),
    ]
    content = {"times": lines, "model": model.as_dict(), "verdicts": verdicts}
    return Output(tables, content, lines, files=written)


def _all_cells() -> Mapping[str, Cell]:
    """The declared cells of the packaged scenarios by key, and those on clusters that lack rates."""
    scenarios = [load_scenario(name) for name in packaged("spbench.scenarios")]
    declared = [(each, measure.Narrowing(variant="all")) for each in scenarios if each.document.paper]
    declared += [(scenario, narrowing) for _, scenario, narrowing in _on_other_clusters()]
    return {cell.key: cell for scenario, narrowing in declared for cell in narrowing.declared(scenario)}
