"""Tables of README.md, docs/long_context.md and measured.md: our errors in a few lines; our errors by who
measured real machines, with those of other predictors; and each rung of ALST's ladder, with the longest
sequence, published and simulated, and the time that its switch costs.

Errors of memory by data-parallel backend, and verdicts on published runs that trained or ran out of memory,
as evidence for the trust in other memory and verdicts.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from pandas import DataFrame

from spbench.bench.cell import Cell
from spbench.bench.measure import Evidence, Filled, kinds_of
from spbench.bench.tools.papers import comparison, sources
from spbench.bench.tools.papers.megatron_cases import CASES, GOLDEN_FILES, MEMORY
from spbench.bench.tools.papers.paper_findings import ROLES, TABLES, Line, absolute_errors, distinct
from spbench.bench.tools.papers.past_errors import COUNTED, DATASHEETS, counted_times, log_errors
from spbench.bench.units import difference, error_percent
from spbench.plots.series import grouped

PREDICTORS_FILE = "other_predictors.csv"
_LADDER = "alst"
#: a ratio's name in the scenario: machine and rungs as in the published table, and the step
_PRICE = re.compile(r"(?P<machine>.+), (?P<rung>[^,]+) over (?P<base>[^,]+), (?P<step>[^,]+)")

#: names of quantities for readers
QUANTITY_NAMES: Mapping[str, str] = TABLES.forms["quantities"]


def records_by_source(records: DataFrame) -> dict[sources.MeasuredSource, DataFrame]:
    """The records of each file of measurements that has any, by source; each measured number once."""
    by_file = dict(comparison.groups(distinct(records), "file"))
    return {source: by_file[source.file] for source in sources.measured_sources() if source.file in by_file}


def validation_lines(records: DataFrame) -> list[Line]:
    """A line for each source of measurements and quantity, with other predictors of the same runs; then a
    line for each predictor on other runs. ``records`` are of `spbench reproduce measured`."""
    others = sources.published_file(PREDICTORS_FILE).rows
    of_runs = grouped(others, lambda row: (row["file"], row["quantity"]))
    lines = [
        (f"{source.measured_by}, {source.machines}", name, mine, of_runs.get((source.file, name), []))
        for source, some in records_by_source(records).items()
        for quantity, name in QUANTITY_NAMES.items()
        if len(mine := _of(some, quantity))
    ]
    lines += [(row["compared"], row["quantity"], records[:0], [row]) for row in others if not row["file"]]
    return [
        {
            "measured by, on": measured,
            "quantity": quantity,
            **_errors_and_roles(some),
            "other predictors": "; ".join(map(_other_predictor, same)),
        }
        for measured, quantity, some, same in lines
    ]


def _errors_and_roles(records: DataFrame) -> Line:
    """The number of records, the median and worst absolute error, and the number of each role."""
    roles, errors = records["role"].value_counts(), absolute_errors(records)
    return {
        "numbers": len(errors) if len(records) else "",
        "median error": error_percent(median(errors)) if errors else "",
        "worst": error_percent(max(errors)) if errors else "",
        "role": ", ".join(f"{roles[role]} {role}" for role in ROLES if role in roles),
    }


def _other_predictor(other: Mapping[str, str]) -> str:
    """In words, another predictor's errors on runs of our files, else the errors that its authors state."""
    if other["file"]:
        errors = predictor_errors(other)
        return f"{other['predictor']} {error_percent(median(errors))}, worst {error_percent(max(errors))}"
    worst = f", worst {other['worst']}" if other["worst"] else ""
    return f"{other['predictor']}, as it states: mean {other['mean']}{worst}"


def predictor_errors(other: Mapping[str, str]) -> list[float]:
    """|predicted / measured - 1| of another predictor, for each row of a file of measurements: ``other``, a
    row of results/measured/other_predictors.csv, names the file and both columns."""
    rows = sources.published_file(other["file"]).rows
    return [abs(float(row[other["predicted"]]) / float(row[other["measured"]]) - 1) for row in rows]


# -- how far to trust a number -------------------------------------------------------------------------------

#: how the description of a formula begins that counts elements leaving a GPU; others count by a convention
_COUNTS_WIRE = "elements that a GPU sends"
#: names of quantities that are a peak of memory
_PEAKS = ("memory_mb", "memory_gb", "peak_memory_gib")
#: classes of rates that are measured, perhaps at another length, or on another card or kernel
_MEASURED_RATES = ("sourced", "extrapolated", "transferred")


def trust_lines(folder: Path) -> list[Line]:
    """Four lines: errors of memory, of sent bytes, and of step times by measured and by other rates.

    Args:
        folder: the folder of the files of `spbench reproduce`.

    Raises:
        UserError: a file cannot be read.
    """
    files = {name: folder / f"{name}.csv" for name in sources.papers()}
    by_paper = {name: comparison.read_comparisons(path) for name, path in files.items()}
    by_source = records_by_source(by_paper.pop(sources.MEASURED))
    on_b200 = comparison.joined(
        some
        for source, some in by_source.items()
        if "B200" in source.machines and "GB200" not in source.machines
    )
    others = comparison.joined(some for name, some in by_paper.items() if name != sources.EXPERTS)
    cases = comparison.read_csv(folder / f"{CASES}_errors.csv")[1]
    of_cases = comparison.frame_of({**line, "relative_error": float(line["error"])} for line in cases)
    peaks = _of(on_b200, "peak_memory_gib"), _of(on_b200, "reserved_memory_gib")
    times = counted_times([*files.values(), folder / f"{DATASHEETS}.csv"])
    times["relative_error"] = [math.expm1(error) for error in log_errors(times)]
    is_measured = times["rates"].isin(_MEASURED_RATES)
    memory = comparison.joined([*peaks, of_cases, _of(distinct(others), *_PEAKS)])
    kinds = [
        ("memory", "Megatron-LM on A100 to GB200; tables of RSA, LASP, LASP-2 and FPDT", memory),
        ("bytes sent for a layer", "papers' formulas, at several sizes", _wire_counts(others)),
        ("step time, rates of benchmarks of this or another card", "published steps", times[is_measured]),
        ("other step times (fits, datasheets, unlike programs)", "published steps", times[~is_measured]),
    ]
    return [
        {"quantity": quantity, "compared with": against, **_errors_and_roles(some)}
        for quantity, against, some in kinds
    ]


def _of(records: DataFrame, *quantities: str) -> DataFrame:
    return records[records["quantity"].isin(quantities)]


def _wire_counts(records: DataFrame) -> DataFrame:
    """The records of formulas that count elements leaving a GPU, and not by a paper's convention."""
    formulas = records[records["role"] == "formula"]
    counted = {
        f"{file}:{row['claim']}:published"
        for file in formulas["file"].unique()
        for row in sources.published_file(file).rows
        if row["what"].startswith(_COUNTS_WIRE)
    }
    return formulas[formulas["source"].isin(counted)]


# -- the ladder ----------------------------------------------------------------------------------------------


def ladder_lines(records: DataFrame) -> list[Line]:
    """A line for each rung of ALST's ladder, in the order of the published table; the price is empty if no
    step was timed with and without the rung's switch.

    Args:
        records: the records of `spbench reproduce field`.
    """
    prices: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in comparison.lines_of(records[records["reproduced"].notna()]):
        if price := _PRICE.fullmatch(record.table_name):
            of = prices[f"{price['machine']}, {price['rung']}"]
            of[price["base"]].append(f"{difference(record.reproduced - 1)} ({price['step']})")
    lines = []
    for record in comparison.lines_of(records[records["table_name"] == _LADDER]):
        machine, _, rung = record.label.rpartition(", ")
        paid = prices[record.label].items()
        lines.append(
            {
                "on": machine.replace("gpus ", ""),
                "options": rung,
                "longest, published": _length(record.published),
                "ours": _length(record.reproduced),
                "step": "; ".join(f"{', '.join(steps)} over {base}" for base, steps in paid),
            }
        )
    return lines


def _length(tokens: float | None) -> str:
    return "none" if tokens is None else f"{round(tokens):,}"


#: the kind of memory of each quantity of published tables
_MEMORY: Mapping[str, str] = TABLES.forms["memory"]
#: quantities of memory whose errors do not count, because settings were chosen by looking at them
_SEEN = ("allocated_gib", "reserved_gib", "allocated_memory_gib")


def memory_errors(
    paths: Iterable[Path], cells: Mapping[str, Cell], of_cases: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, list[float]]]:
    """The relative errors of the counted numbers of files of `spbench reproduce`, each published number once,
    by backend and quantity, in ascending order; of a run's ranks only the one with the largest error counts.

    Args:
        cells: cells by key; records without a cell are left out.
        of_cases: lines of megatron_cases_errors.csv, which replace the golden values of other files.
    """
    errors = [  # each of a backend, a quantity and a run
        ("megatron", "peak", "{case} {golden} {quantity}".format(**line), float(line["error"]))
        for line in of_cases
        if line["quantity"] in MEMORY[:2]  # which are peaks
    ]
    for path in paths:
        records = comparison.read_comparisons(path)
        counted = records["role"].isin(COUNTED) & records["cell"].isin(cells)
        records = distinct(_of(records[counted], *_MEMORY))
        scored = records["file"].isin(GOLDEN_FILES if of_cases else ())
        for record in comparison.lines_of(records[records["has_both"] & ~scored]):
            kind = cells[record.cell].training.backend, _MEMORY[record.quantity]
            run = " ".join(record.source.split(":")[:3])
            errors.append((*kind, run, record.reproduced / record.published - 1))
    by_backend: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (backend, quantity), runs in sorted(grouped(errors, lambda each: each[:2]).items()):
        of_run = grouped(runs, lambda each: each[2]).values()
        furthest = (max((error for *_, error in some), key=abs) for some in of_run)
        by_backend[backend][quantity] = sorted(float(f"{error:.6g}") for error in furthest)
    return dict(by_backend)


def filled_runs(paths: Iterable[Path], cells: Mapping[str, Cell]) -> tuple[list[Filled], set[str]]:
    """(the published runs that trained or ran out of memory, each once; the kinds of programs whose memory
    was measured).

    Args:
        paths: paths of files of `spbench reproduce`.
        cells: cells by key; records without a cell are left out.
    """
    records = comparison.joined(comparison.read_comparisons(path) for path in paths)
    records = records[records["cell"].isin(cells) & records["of_table"]]
    records = records.assign(
        part=comparison.parts_of_a_whole(records, comparison.FILLED),
        by=records["source"].map(sources.publishers()),
    )
    of_cell = {key: kinds_of(cells[key]) for key in records["cell"].unique()}
    measured = _of(records[records["has_both"]], *_MEMORY, *_SEEN)
    told = records[records["status_published"].isin(["ok", "oom"]) & records["part"].notna()]
    runs = []
    for run in comparison.lines_of(told.drop_duplicates(["by", "run"])):
        oom = run.status_published == "oom", run.status_reproduced == "oom"
        runs.append(Filled(run.part, of_cell[run.cell], cells[run.cell].training.backend, run.by, *oom))
    return runs, set().union(*(of_cell[key] for key in measured["cell"].unique()))


def certainty_lines(runs: Sequence[Filled], kinds: set[str]) -> list[Line]:
    """Two lines with counts of verdicts: on published runs that trained, and on those that ran out of memory;
    each run is judged by the evidence of the other sources."""
    words: dict[int, str] = {}
    for source, some in grouped(runs, lambda run: run.source).items():
        evidence = Evidence.of((run for run in runs if run.source != source), kinds)
        words |= {id(run): evidence.judged(run).word for run in some}
    lines = []
    for published, oom in (("trained", False), ("out of memory", True)):
        mine = [words[id(run)] for run in runs if run.published_oom is oom]
        counts = {word: mine.count(word) for word in ("fits", "tight", "no")}
        lines.append({"published": published, "runs": len(mine), **counts})
    return lines
