"""Errors of our step times by source of the published times, and of the order of layouts, as evidence for the
trust in other simulated times.

Published times and rates count if no scalar was fitted to the number, each number once for each file of
committed results. The files of :data:`WITHOUT_RATES` have the same runs on clusters with only datasheets, or
without one rate, so that another rate prices its work.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import scipy  # whose parts are imported as they are first used
from pandas import DataFrame, Series

from spbench.bench.cell import Cell
from spbench.bench.measure import Narrowing, Scenario, load_cluster, run_of
from spbench.bench.setting_values import STOOD_IN
from spbench.bench.tools.papers.comparison import (
    OF_TIMES,
    UNKNOWN,
    groups,
    joined,
    lines_of,
    parts_of_a_whole,
    read_comparisons,
)
from spbench.bench.tools.papers.error_fits import LeftOut, coverage, overall
from spbench.bench.tools.papers.paper_findings import TABLES, Line, distinct
from spbench.bench.tools.papers.sources import published_file, publishers
from spbench.bench.units import difference, percent, shown_share, three_digits

#: names of arguments of `spbench reproduce`, of their files and folders of clusters, with a description
DATASHEETS, SUBSTITUTES = "datasheets", "substitutes"
WITHOUT_RATES = {DATASHEETS: "by datasheets alone", SUBSTITUTES: "without a rate of the kind"}
#: the file, in results/field, of groups of measured times of which only the errors are published
GROUPED_FILE = "grouped_errors.csv"
#: roles of numbers to which nothing was fitted
COUNTED = ("predicted", "inferred")
#: in words, the evidence of the rates of each class
RESTS_ON = TABLES.forms["evidence"] | dict.fromkeys(STOOD_IN, "a class above; the measured program differs")
#: kinds of groups that cross-validation leaves out of the intervals, one group at a time, with their names
LEFT_OUT: Mapping[LeftOut, str] = TABLES.forms["left out in turn"]
#: groups of this many times or more are named if a smaller share than this lies within the intervals
GROUP, TOO_FEW = 10, 0.6
#: the quantity in which layouts are compared, for one sample of the batch
STEP_TIME = "step_time_ms"


# -- the order of layouts ------------------------------------------------------------------------------------


def orders(times: DataFrame) -> DataFrame:
    """A line for each run that has several layouts, one model and options, length, number of GPUs, cluster
    and variant: its table, cell and number of layouts; Kendall's tau-b of the published and the simulated
    times of a sample, which ties do not lower (1: the same order, -1: the reverse; NaN: all are ties); the
    layouts of the shortest published and simulated times; and how much longer than the shortest published
    time that of our fastest layout is, as a part of it.

    Args:
        times: a frame of :func:`with_cells`; lines of :data:`STEP_TIME` with both numbers count.
    """
    times = times[(times["quantity"] == STEP_TIME) & times["has_both"] & times["declared"].notna()]
    lines = []
    for _, run in groups(times, "alike"):
        if len({(cell.strategy, cell.mesh_text) for cell in run["declared"]}) > 1:
            batches = [cell.batch or 1 for cell in run["declared"]]
            published, ours = (run[name] / batches for name in ("published", "reproduced"))
            fastest: list[Any] = [published.idxmin(), ours.idxmin()]
            line = {"table": run["table_name"].iloc[0], "cell": run["declared"].iloc[0], "layouts": len(run)}
            line |= {"tau": float(scipy.stats.kendalltau(published, ours).statistic)}
            line |= dict(zip(("fastest", "our_fastest"), run["declared"].loc[fastest], strict=True))
            lines.append(line | {"distance": published[fastest[1]] / published[fastest[0]] - 1})
    return DataFrame(lines, columns=["table", "cell", "layouts", "tau", "fastest", "our_fastest", "distance"])


def order_lines(records: DataFrame, cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each run of :func:`orders`: how many layouts it has, tau, the fastest layout as published
    and by our times, and how much longer ours took as published than the fastest; ``cells`` by key."""
    runs = orders(with_cells(records[records["quantity"] == STEP_TIME], cells))
    return TABLES.records("order", lines_of(runs), shown_tau=shown_tau)


def orders_by_scenario(scenarios: Iterable[Scenario], records: DataFrame) -> dict[str, list[Line]]:
    """The :func:`order_lines` of each scenario that has any, by its name."""
    by_name = {}
    for scenario in scenarios:
        cells = {cell.key: cell for cell in Narrowing(variant="all").declared(scenario)}
        if lines := order_lines(records[records["scenario"] == scenario.name], cells):
            by_name[scenario.name] = lines
    return by_name


def shown_tau(tau: float | None) -> str:
    """Tau with two digits after the point; "" for None or not-a-number."""
    return "" if tau is None or math.isnan(tau) else f"{tau:.2f}"


# -- step times ----------------------------------------------------------------------------------------------


def with_cells(records: DataFrame, cells: Mapping[str, Cell]) -> DataFrame:
    """The records with two more columns: ``declared``, the cell (None if ``cells`` lacks it), and ``alike``,
    equal for records of one run: their table, variant and :func:`run_of` the cell; "" without a cell."""
    declared = [cells.get(key) for key in records["cell"]]
    alike = [
        cell and str((table, cell.variant, *run_of(cell.model_dump(mode="json"))))
        for table, cell in zip(records["table_name"], declared, strict=True)
    ]
    runs = [run or "" for run in alike]
    return records.assign(declared=Series(declared, records.index, object), alike=runs)


def counted_times(paths: Iterable[Path]) -> DataFrame:
    """The counted times of files of `spbench reproduce`, each published number once for each file.

    Raises:
        UserError: a file cannot be read, or is so old that it lacks a column of :data:`OF_TIMES`.
    """

    def counted(records: DataFrame) -> DataFrame:
        rests = records["is_time"] & records["has_both"] & (records[[*OF_TIMES]] != "").all(axis=1)
        return distinct(records[rests & records["role"].isin(COUNTED)])

    return joined(counted(read_comparisons(path, OF_TIMES)) for path in paths)


def log_errors(records: DataFrame) -> list[float]:
    """log(simulated / published) of the times of records; a rate counts as the inverse of a time."""
    errors = (records["reproduced"] / records["published"]).map(math.log)
    return errors.where(~records["is_rate"], -errors).to_list()


def observations(records: DataFrame, cells: Mapping[str, Cell]) -> DataFrame:
    """The records of some times, with the further columns of :mod:`tools.papers.error_fits`; all figures and
    tables of a paper are one source.

    Args:
        records: a frame of :func:`counted_times`.
        cells: cells by key; a record without a cell is compared with no other record.
    """
    seen, source_of = with_cells(records, cells), publishers()
    devices = [cell and load_cluster(cell.cluster).device for cell in seen["declared"]]
    # the kernel of its attention; "none" of a model without
    kernels = [cell.model_options.get("attention", "none") if cell else "" for cell in seen["declared"]]
    # a rate is of a run's cells, all of the same length
    batches = [(cell and cell.batch) or 1 for cell in seen["declared"]]
    times = (seen["reproduced"] / batches).where(~seen["is_rate"], 1 / seen["reproduced"])
    return seen.assign(
        source=[source_of(source) for source in seen["source"]],
        log_error=log_errors(seen),
        log_time=times.map(math.log),
        machine=[device.name if device else "" for device in devices],
        kernel=[
            device.attention.default if device and device.attention and kernel == "flash" else kernel
            for device, kernel in zip(devices, kernels, strict=True)
        ],
        unknown=[min(1.0, 0.0 if math.isnan(part) else part) for part in parts_of_a_whole(seen, UNKNOWN)],
    )


def grouped_observations() -> DataFrame:
    """Observations of groups of times whose rows are unpublished: each row has its group's median error."""
    lines = DataFrame(published_file(GROUPED_FILE).rows)
    errors = lines["median_error"].map(lambda error: math.log1p(float(error)))
    lines = lines.rename(columns={"measured by": "source", "machines": "machine"})
    lines = lines.assign(log_error=errors, alike="", log_time=0.0, unknown=0.0)
    return lines.loc[lines.index.repeat(lines["rows"].astype(int))]


def time_lines(records: DataFrame, cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each class of rates and source: how many times, their errors, the order of layouts, and how
    many lie within the intervals that the other sources give. Each class ends with a line of all, in which
    sources count alike, and the last is of all classes.

    Args:
        records, cells: see :func:`observations`.
    """
    seen = observations(records, cells)
    covered = coverage(seen)
    lines = []
    for rates, of_class in groups(seen, "rates"):
        for source, some in groups(of_class, "source"):
            within = covered[(covered["rates"] == rates) & (covered["source"] == source)]
            lines.append(
                {
                    "rates": rates,
                    "measured by": source,
                    "times": len(some),
                    **_errors(some["log_error"]),
                    **_order(orders(some)),
                    "within 80% intervals": "".join(f"{w.within} of {w.rows}" for w in lines_of(within)),
                }
            )
        lines.append(_all(rates, covered[covered["rates"] == rates]))
    return [*lines, _all("all", covered)]


def class_lines(records: DataFrame) -> list[Line]:
    """A line for each class of rates: the evidence of its rates, numbers of times and sources, errors, and
    the share within the intervals that the other sources give; all sources weigh the same."""
    seen = observations(records, {})
    covered = coverage(seen)
    lines = []
    for rates, some in sorted(groups(seen, "rates"), key=lambda of: [*RESTS_ON].index(of[0])):
        errors, of_class = _errors(some["log_error"]), covered[covered["rates"] == rates]
        within = overall(of_class) if len(of_class) else None
        about = {"rates": rates, "rests_on": RESTS_ON, "times": some, "errors": errors, "within": within}
        lines.append(TABLES.record("class", **about))
    return lines


def left_out_lines(records: DataFrame, cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each kind of group that is left out in turn (sources, machines, kernels): how many times lie
    within the intervals of the rest, and each group of at least :data:`GROUP` times of which fewer than
    :data:`TOO_FEW` do.

    Args:
        records, cells: see :func:`observations`.
    """
    seen = observations(records, cells)
    lines = []
    for what, name in LEFT_OUT.items():
        covered = coverage(seen, what)
        rows, within = covered["rows"].sum(), covered["within"].sum()
        few = covered[(covered["rows"] >= GROUP) & (covered["within"] < TOO_FEW * covered["rows"])]
        named = [
            f"{each.source}, {each.rates}{f' ({each.left_out})' if each.left_out != each.source else ''}: "
            f"{each.within} of {each.rows}"
            for each in lines_of(few)
        ]
        lines.append(
            {
                "left out in turn": name,
                "groups": covered["left_out"].nunique(),
                "times": int(rows),
                "within the 80% interval of the rest": percent(within / rows) if rows else "",
                f"groups of {GROUP} or more times, under {TOO_FEW:.0%} within": "; ".join(named) or "none",
            }
        )
    return lines


def _errors(errors: Iterable[float]) -> Line:
    """The median, mean and worst absolute relative error of times, and the mean with its sign (bias)."""
    parts = [math.expm1(error) for error in errors]
    sizes = [abs(part) for part in parts]
    shown = {"median error": median(sizes), "mean": fmean(sizes), "worst": max(sizes)}
    bias = difference(fmean(parts))
    return {name: f"{three_digits(100 * value)}%" for name, value in shown.items()} | {"bias": bias}


def _order(runs: DataFrame) -> Line:
    far = percent(fmean(runs["distance"])) if len(runs) else ""
    tau = shown_tau(runs["tau"].mean())
    return {"runs compared": len(runs) or "", "tau": tau, "our best from the best": far}


def _all(rates: str, covered: DataFrame) -> Line:
    return {
        "rates": rates,
        "measured by": f"all, {covered['source'].nunique()} sources alike",
        "times": int(covered["rows"].sum()),
        **dict.fromkeys([*_errors([0.0]), "runs compared", "tau", "our best from the best"], ""),
        "within 80% intervals": shown_share(overall(covered)) if len(covered) else "",
    }
