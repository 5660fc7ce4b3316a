"""How far simulated step times are from published ones, source by source: what the bands of other times rest
on, and how many published times lie within them.

All times and rates of committed results count that no scalar was fitted to, each published number once; those
of :data:`WITHOUT_RATES` are the same runs on clusters of which no more is known than datasheets say, or from
which a rate was taken away, so that something else prices what it is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.trust.error_model import Covered, Observation, coverage, overall
from spbench.bench.tools.papers.comparison import read_records
from spbench.bench.tools.papers.order_of_splits import mean_tau, orders, run_name, shown_tau
from spbench.bench.tools.papers.paper_findings import OF_TIMES, Line, Record, distinct, is_time
from spbench.bench.tools.papers.sources import FIELD_SOURCES_FILE, SOURCES_FILE, published_file
from spbench.bench.units import three_digits
from spbench.plots.series import grouped

#: arguments of `spbench reproduce`, the files of their records, and the folders of their clusters; in words
DATASHEETS, SUBSTITUTES = "datasheets", "substitutes"
WITHOUT_RATES = {DATASHEETS: "by datasheets alone", SUBSTITUTES: "without a rate that is known"}
#: groups of measured times of which the errors alone are told, in results/field
TOLD_FILE = "told_errors.csv"
#: the argument of `spbench reproduce` that fits the bands, and the part of README.md that it writes
BANDS = "bands"
TIMES = "times"
#: roles of numbers to which nothing was fitted
COUNTED = ("predicted", "inferred")


def counted_times(paths: Iterable[Path]) -> list[Record]:
    """The counted times of files of `spbench reproduce`, each published number once for each file.

    Raises:
        UserError: a file cannot be read, or is of a version that did not say what a time rests on.
    """
    files = ([r for r in read_records(path, OF_TIMES) if _counts(r)] for path in paths)
    return [record for records in files for record in distinct(records)]


def _counts(record: Record) -> bool:
    known = record["rates"] and record["bound"] and record["published"] and record["reproduced"]
    return bool(known and is_time(record["quantity"]) and record["role"] in COUNTED)


def log_error(record: Record) -> float:
    """log(simulated / published) of the time that a record is of, or that its rate says."""
    error = math.log(record["reproduced"] / record["published"])
    return -error if record["quantity"].endswith("per_s") else error


def source_names() -> dict[str, str]:
    """Who measured, by file of published numbers."""
    names: dict[str, str] = {}
    for file in (FIELD_SOURCES_FILE, SOURCES_FILE):
        rows = published_file(file).rows
        names |= {row["file"]: row["measured by"] for row in rows}
    return names


def source_of(record: Record, names: Mapping[str, str]) -> str:
    """Who measured a record's published number; the figures and tables of a paper are one source, under the
    first word of their files' names."""
    file = record["source"].partition(":")[0]
    return names.get(file) or file.partition("_")[0].upper()


def observations(records: Sequence[Record], cells: Mapping[str, Cell]) -> list[Observation]:
    """The errors of some times.

    Args:
        records: of :func:`counted_times`.
        cells: by key; a record whose cell is not there is compared with no other.
    """
    names = source_names()
    return [
        Observation(
            source=source_of(record, names),
            rates=record["rates"],
            bound=record["bound"],
            strategy=record["strategy"],
            log_error=log_error(record),
            **_compared(record, cells.get(record["cell"])),
        )
        for record in records
    ]


def told_observations() -> list[Observation]:
    """The errors of groups of times whose rows are not open: each row of a group has the group's median."""
    groups = published_file(TOLD_FILE).rows
    return [
        Observation(
            group["measured by"],
            group["rates"],
            group["bound"],
            group["strategy"],
            math.log1p(float(group["median_error"])),
        )
        for group in groups
        for _ in range(int(group["rows"]))
    ]


def _compared(record: Record, cell: Cell | None) -> dict[str, Any]:
    """What an observation is compared with others by; nothing where the cell is not known."""
    if cell is None:
        return {}
    simulated = record["reproduced"]
    rate = record["quantity"].endswith("per_s")  # of a run's cells, all of the same length
    time = 1 / simulated if rate else simulated / (cell.batch or 1)
    return {"alike": run_name(record, cell), "log_time": math.log(time)}


def time_lines(records: Sequence[Record], cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each class of rates and source: how many times, their errors, the order of splits, and how
    many lie within the intervals that the other sources give. Each class ends with a line of all, in which
    sources count alike, and the last is of all classes.

    Args:
        records, cells: as of :func:`observations`.
    """
    seen = observations(records, cells)
    covered = {(each.rates, each.source): each for each in coverage(seen)}
    lines = []
    for rates, of_class in grouped(zip(records, seen, strict=True), lambda each: each[1].rates).items():
        for source, some in grouped(of_class, lambda each: each[1].source).items():
            within = covered.get((rates, source))
            lines.append(
                {
                    "rates": rates,
                    "measured by": source,
                    **_errors([o.log_error for _, o in some]),
                    **_order([record for record, _ in some], cells),
                    "within 80% intervals": f"{within.within} of {within.rows}" if within else "",
                }
            )
        lines.append(_all(rates, [each for each in covered.values() if each.rates == rates]))
    return [*lines, _all("all", list(covered.values()))]


def _errors(errors: Sequence[float]) -> Line:
    """How many there are, the median, the mean and the worst of their sizes, and their mean with its sign, as
    parts of the published times."""
    parts = [math.expm1(error) for error in errors]
    sizes = [abs(part) for part in parts]
    shown = {"median error": median(sizes), "mean": fmean(sizes), "worst": max(sizes)}
    return {
        "times": len(errors),
        **{name: f"{three_digits(100 * value)}%" for name, value in shown.items()},
        "bias": f"{fmean(parts):+.1%}",
    }


def _order(records: Sequence[Record], cells: Mapping[str, Cell]) -> Line:
    runs = orders(records, cells)
    distance = f"{fmean(run.distance for run in runs):.1%}" if runs else ""
    tau = shown_tau(mean_tau(runs)) if runs else ""
    return {"runs split": len(runs) or "", "tau": tau, "our best from the best": distance}


def _all(rates: str, covered: Sequence[Covered]) -> Line:
    share = f"{overall(covered):.0%}" if covered else ""
    blank = dict.fromkeys(
        ("median error", "mean", "worst", "bias", "runs split", "tau", "our best from the best"), ""
    )
    sources = f"all, {len({each.source for each in covered})} sources alike"
    return {
        "rates": rates,
        "measured by": sources,
        "times": sum(each.rows for each in covered),
        **blank,
        "within 80% intervals": share,
    }
