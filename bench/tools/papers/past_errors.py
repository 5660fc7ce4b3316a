"""How far ours are from published numbers, as evidence for other numbers: errors of step times by who
measured, and the order of layouts.

Those times and rates of committed results count that no scalar was fitted to, each published number once for
each file; the files of :data:`WITHOUT_RATES` are the same runs on clusters of which no more is known than
datasheets say, or from which a rate was taken away, so that something else prices what it is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import scipy  # whose parts are imported as they are first used

from spbench.bench.cell import Cell
from spbench.bench.measure import ALL, Narrowing, Scenario, load_cluster, run_of
from spbench.bench.setting_values import STOOD_IN
from spbench.bench.tools.papers.comparison import OF_TIMES, Comparison, read_comparisons
from spbench.bench.tools.papers.error_fits import Covered, LeftOut, StepObservation, coverage, overall
from spbench.bench.tools.papers.paper_findings import Line, distinct
from spbench.bench.tools.papers.sources import published_file, publishers
from spbench.bench.units import difference, percent, shown_share, three_digits
from spbench.plots.series import grouped

#: arguments of `spbench reproduce`, the files of their records, and the folders of their clusters; in words
DATASHEETS, SUBSTITUTES = "datasheets", "substitutes"
WITHOUT_RATES = {DATASHEETS: "by datasheets alone", SUBSTITUTES: "without a rate of the kind"}
#: groups of measured times of which the errors alone are told, in results/field
GROUPED_FILE = "grouped_errors.csv"
#: roles of numbers to which nothing was fitted
COUNTED = ("predicted", "inferred")
#: by class of rates, what the rates rest on, for readers
RESTS_ON = {
    "sourced": "benchmarks of the same kernels and links",
    "extrapolated": "the same kernel or link at another length, mask, head size or number of ranks",
    "transferred": "the rate of another card, kernel or host",
    "substituted": "no measurement of the kind: attention priced as a matmul, a link by its datasheet",
    "fitted": "a scalar of the cluster, fitted to other published steps of the same model and strategy",
    "fitted elsewhere": "the same, fitted to steps of another model or strategy",
    "datasheet": "datasheets alone",
} | dict.fromkeys(STOOD_IN, "rates of these kinds, and a program other than the one measured")
#: what is left out of the intervals, one at a time, to count how many of its times they hold
LEFT_OUT: dict[LeftOut, str] = {
    "source": "who measured",
    "machine": "accelerator",
    "kernel": "attention kernel",
}
#: groups of so many times are named where fewer than this share lies within
GROUP, TOO_FEW = 10, 0.6
#: the quantity of which layouts are compared, by sample of the batch
STEP_TIME = "step_time_ms"


# -- the order of layouts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimesOrder:
    """The layouts of a run: one model and options, length, number of GPUs, cluster and variant.

    Attributes:
        table: the published one.
        layouts: several, of each its cell, and the published and the simulated time of a sample.
    """

    table: str
    layouts: list[tuple[Cell, float, float]]

    @property
    def tau(self) -> float:
        """Kendall's tau-b, which ties do not lower: 1: the same order, -1: the reverse; nan: all are ties."""
        _, published, ours = zip(*self.layouts, strict=True)
        return float(scipy.stats.kendalltau(published, ours).statistic)

    @property
    def fastest(self) -> tuple[tuple[Cell, float, float], tuple[Cell, float, float]]:
        """The layout whose published time is shortest, and that whose simulated time is."""
        return min(self.layouts, key=lambda each: each[1]), min(self.layouts, key=lambda each: each[2])

    @property
    def distance(self) -> float:
        """How much longer than the shortest published time that of our fastest layout is, as a part of it."""
        published, ours = self.fastest
        return ours[1] / published[1] - 1


def orders(records: Iterable[Comparison], cells: Mapping[str, Cell]) -> list[TimesOrder]:
    """The runs of some records that have several layouts.

    Args:
        cells: by key; a record whose cell is not there is left out.
    """
    runs: dict[str, TimesOrder] = {}
    for record in records:
        cell, published, ours = cells.get(record.cell), record.published, record.reproduced
        if record.quantity != STEP_TIME or cell is None or published is None or ours is None:
            continue
        batch = cell.batch or 1
        run = runs.setdefault(_run_name(record, cell), TimesOrder(record.table_name, []))
        run.layouts.append((cell, published / batch, ours / batch))
    return [
        run for run in runs.values() if len({(cell.strategy, cell.mesh_text) for cell, *_ in run.layouts}) > 1
    ]


def _run_name(record: Comparison, cell: Cell) -> str:
    """What the records of one run have in common: their table and variant, and :func:`run_of` their cells."""
    return str((record.table_name, cell.variant, *run_of(cell.model_dump(mode="json"))))


def order_lines(records: Iterable[Comparison], cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each run of :func:`orders`: its number of layouts, tau, the fastest as published and ours,
    and how much longer than the fastest the published time of ours is."""
    lines = []
    for order in orders(records, cells):
        (published, *_), (ours, *_) = order.fastest
        cell = order.layouts[0][0]
        lines.append(
            {
                "table": order.table,
                "model": cell.model,
                "cluster": cell.cluster,
                "seq_len": cell.seq_len,
                "GPUs": cell.sizes.world,
                "layouts": len(order.layouts),
                "tau": shown_tau(order.tau),
                "fastest published": published.mesh_text,
                "fastest ours": ours.mesh_text,
                "published time of ours": difference(order.distance),
            }
        )
    return lines


def orders_by_scenario(scenarios: Iterable[Scenario], records: Sequence[Comparison]) -> dict[str, list[Line]]:
    """The :func:`order_lines` of each scenario that has any, by its name."""
    by_name = {}
    for scenario in scenarios:
        cells = {cell.key: cell for cell in Narrowing(variant=ALL).declared(scenario)}
        if lines := order_lines((r for r in records if r.scenario == scenario.name), cells):
            by_name[scenario.name] = lines
    return by_name


def mean_tau(runs: Iterable[TimesOrder]) -> float:
    """The mean of the taus of some runs that have one; nan if none has."""
    taus = [order.tau for order in runs if not math.isnan(order.tau)]
    return fmean(taus) if taus else math.nan


def shown_tau(tau: float) -> str:
    """Tau with two digits after the point; "" where there is none."""
    return "" if math.isnan(tau) else f"{tau:.2f}"


# -- step times ----------------------------------------------------------------------------------------------


def counted_times(paths: Iterable[Path]) -> list[Comparison]:
    """The counted times of files of `spbench reproduce`, each published number once for each file.

    Raises:
        UserError: a file cannot be read, or is of a version that did not say what a time rests on.
    """

    def counts(r: Comparison) -> bool:
        is_timed = r.rates and r.bound and r.published and r.reproduced
        return bool(is_timed and r.is_time and r.role in COUNTED)

    files = (filter(counts, read_comparisons(path, OF_TIMES)) for path in paths)
    return [record for records in files for record in distinct([*records])]


def log_error(record: Comparison) -> float:
    """log(simulated / published) of the time that a record is of, or that its rate says."""
    published, ours = record.both
    error = math.log(ours / published)
    return -error if record.is_rate else error


def observations(records: Sequence[Comparison], cells: Mapping[str, Cell]) -> list[StepObservation]:
    """The errors of some times, each with who measured: the figures and tables of a paper are one source,
    under the first word of their files' names.

    Args:
        records: of :func:`counted_times`.
        cells: by key; a record whose cell is not there is compared with no other.
    """
    source_of, seen = publishers(), []
    for record in records:
        known: dict[str, Any] = {}
        if (cell := cells.get(record.cell)) is not None:
            # the kernel of its attention; "none" of a model without
            device, kernel = load_cluster(cell.cluster).device, cell.model_options.get("attention", "none")
            if kernel == "flash" and device.attention is not None:
                kernel = device.attention.default
            _, simulated = record.both
            # a rate is of a run's cells, all of the same length
            time = 1 / simulated if record.is_rate else simulated / (cell.batch or 1)
            known = {"alike": _run_name(record, cell), "log_time": math.log(time)}
            known |= {"machine": device.name, "kernel": kernel}
        rests = record.rates, record.bound, record.strategy, log_error(record)
        seen.append(StepObservation(source_of(record.source), *rests, unknown=record.share, **known))
    return seen


def grouped_observations() -> list[StepObservation]:
    """The errors of groups of times whose rows are not open: each row of a group has the group's median."""
    return [
        StepObservation(
            group["measured by"],
            group["rates"],
            group["bound"],
            group["strategy"],
            math.log1p(float(group["median_error"])),
            machine=group["machines"],
            kernel=group["kernel"],
        )
        for group in published_file(GROUPED_FILE).rows
        for _ in range(int(group["rows"]))
    ]


def time_lines(records: Sequence[Comparison], cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each class of rates and source: how many times, their errors, the order of layouts, and how
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
                    "times": len(some),
                    **_errors([o.log_error for _, o in some]),
                    **_order([record for record, _ in some], cells),
                    "within 80% intervals": f"{within.within} of {within.rows}" if within else "",
                }
            )
        lines.append(_all(rates, [each for each in covered.values() if each.rates == rates]))
    return [*lines, _all("all", list(covered.values()))]


def class_lines(records: Sequence[Comparison]) -> list[Line]:
    """A line for each class of rates: what it rests on, how many times and sources, the errors of the times,
    and the share within the intervals that the other sources give, in which sources count alike."""
    seen = observations(records, {})
    of_class = grouped(seen, lambda o: o.rates)
    covered = grouped(coverage(seen), lambda each: each.rates)
    lines = []
    for rates, some in sorted(of_class.items(), key=lambda of: [*RESTS_ON].index(of[0])):
        errors = _errors([o.log_error for o in some])
        lines.append(
            {
                "rates": rates,
                "rest on": RESTS_ON[rates],
                "times (sources)": f"{len(some)} ({len({o.source for o in some})})",
                "median error": errors["median error"],
                "mean with its sign": errors["bias"],
                "worst": errors["worst"],
                "in 80% intervals": shown_share(overall(covered[rates])) if rates in covered else "",
            }
        )
    return lines


def left_out_lines(records: Sequence[Comparison], cells: Mapping[str, Cell]) -> list[Line]:
    """What is left out of the intervals in turn, sources, machines or kernels: how many times lie within the
    intervals of the rest, and every group of :data:`GROUP` times or more of which fewer than
    :data:`TOO_FEW` do.

    Args:
        records, cells: as of :func:`observations`.
    """
    seen = observations(records, cells)
    lines = []
    for what, name in LEFT_OUT.items():
        covered = coverage(seen, what)
        rows, within = sum(each.rows for each in covered), sum(each.within for each in covered)
        named = [
            f"{each.source}, {each.rates}{f' ({each.left_out})' if each.left_out != each.source else ''}: "
            f"{each.within} of {each.rows}"
            for each in covered
            if each.rows >= GROUP and each.within < TOO_FEW * each.rows
        ]
        lines.append(
            {
                "left out in turn": name,
                "groups": len({each.left_out for each in covered}),
                "times": rows,
                "within the 80% interval of the rest": percent(within / rows) if rows else "",
                f"of {GROUP} times or more, fewer than {TOO_FEW:.0%} within": "; ".join(named) or "none",
            }
        )
    return lines


def _errors(errors: Sequence[float]) -> Line:
    """The median, the mean and the worst of the sizes of errors, and their mean with its sign, as parts of
    the published times."""
    parts = [math.expm1(error) for error in errors]
    sizes = [abs(part) for part in parts]
    shown = {"median error": median(sizes), "mean": fmean(sizes), "worst": max(sizes)}
    bias = difference(fmean(parts))
    return {name: f"{three_digits(100 * value)}%" for name, value in shown.items()} | {"bias": bias}


def _order(records: Sequence[Comparison], cells: Mapping[str, Cell]) -> Line:
    runs = orders(records, cells)
    far = percent(fmean(run.distance for run in runs)) if runs else ""
    return {"runs compared": len(runs) or "", "tau": shown_tau(mean_tau(runs)), "our best from the best": far}


def _all(rates: str, covered: Sequence[Covered]) -> Line:
    sources = f"all, {len({each.source for each in covered})} sources alike"
    return {
        "rates": rates,
        "measured by": sources,
        "times": sum(each.rows for each in covered),
        **dict.fromkeys([*_errors([0.0]), *_order([], {})], ""),
        "within 80% intervals": shown_share(overall(covered)) if covered else "",
    }
