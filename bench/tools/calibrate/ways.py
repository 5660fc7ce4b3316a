"""`spbench calibrate`'s three ways to a cluster's rates: fit them, measure a machine, or read logs; and its
check of a machine, which compares predictions of cells on the cluster that was just measured with the cells'
measured times on real ranks. No prediction uses the cell's own measured time."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.options import refuse_given
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError, refuse_unknown
from spbench.bench.files import resolved, write_whole
from spbench.bench.tools.calibrate.cluster_of_logs import cluster_of_logs, heading
from spbench.bench.tools.calibrate.fit import TABLES, fitted_to_published
from spbench.bench.tools.calibrate.log_findings import findings_of
from spbench.bench.tools.calibrate.machine_report import MachineRequest, measured_machine
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.yaml_text import comment, dump


def checked_machine(asked: MachineRequest, scenario: str, output: Path) -> Output:
    """Measure this machine and a scenario's cells, and compare the cells' measured steps with the steps that
    are predicted on the measured cluster. Each number of ranks gets a cluster file, ``output`` with the
    number in its name.

    Raises:
        UserError: there is no such scenario, the scenario has fewer than two cells on the number of ranks, or
            :func:`measured_machine` raises one.
    """
    declared = measure.Narrowing(engines=("distributed",), device="cpu").declared(load_scenario(scenario))
    cells = [cell for cell in declared if asked.world_size in (None, cell.sizes.world)]
    if len(cells) < 2:
        ranks = "" if asked.world_size is None else f" on {asked.world_size} ranks"
        raise UserError(f"--check {scenario}: it has {len(cells)} cells{ranks}, and an order needs two")
    load = os.getloadavg()[0]
    notes = [f"load of the machine before: {load:.2f}"]
    files: list[Path] = []
    rows: list[dict[str, Any]] = []
    for count in sorted({cell.sizes.world for cell in cells}):
        path = output.with_name(f"{output.stem}-{count}.yaml")
        measured = measured_machine(replace(asked, world_size=count), path)
        files += measured.files
        notes += [f"{count} ranks: {note}" for note in measured.notes[:-1]]
        cluster = measure.load_cluster(str(path))
        of_size = [cell for cell in cells if cell.sizes.world == count]
        message(f"measuring and predicting {len(of_size)} cells on {count} rank{'s' if count > 1 else ''}")
        for cell, samples in zip(of_size, measured_samples(of_size), strict=True):
            rows.append(compared(cell, samples, predicted(cell, cluster)) | figures(cluster))
    made_by = {name: value for name, value in measure.provenance().items() if name not in ("machine", "tree")}
    agreed = agreement(rows)
    title = "Step times in seconds, measured (median, least and most of the samples) and predicted"
    return Output(
        [TABLES.table("checked", title, rows), TABLES.text("agreement", agreed)],
        {"agreement": agreed, "cells": rows},
        [row | made_by for row in rows],
        notes=notes,
        files=files,
    )


def figures(cluster: measure.Cluster) -> dict[str, Any]:
    """The rates and latencies of a cluster that do not depend on a size, by name."""
    return TABLES.record("scalars", cluster)


#: how often each cell is measured, with all other cells in between
ROUNDS = 2


def measured_samples(cells: Sequence[Cell]) -> list[list[float]]:
    """Samples of each cell's step in seconds, measured on real ranks; the cells take turns, so that a busy
    minute slows all of them. Raises the errors of :func:`run_cell`."""
    rounds = [[measure.run_cell(cell).step_time_samples_s for cell in cells] for _ in range(ROUNDS)]
    return [[*chain.from_iterable(of_cell)] for of_cell in zip(*rounds, strict=True)]


def predicted(cell: Cell, cluster: measure.Cluster) -> dict[str, float]:
    """The predicted step time of a cell on virtual ranks, and the parts of that time, in seconds."""
    timeline = measure.trace_classes(cell, events=True).simulator(cluster)()
    return {"step_time_s": timeline.step_time_s, **timeline.breakdown}


def compared(cell: Cell, samples: Sequence[float], prediction: Mapping[str, float]) -> dict[str, Any]:
    """A row that compares a step's predicted seconds, and their parts (``prediction``), with the ``samples``
    of its measured seconds; ``relative_error`` is predicted / measured - 1."""
    return TABLES.record("compared", prediction, cell=cell, samples=samples, measured=median(samples))


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The agreement of the predicted times, and of their order, with the measured times, by two or more
    cells' rows, which :func:`compared` makes.

    Returns:
        tau: Kendall's tau over all cells.
        clear_pairs: the number of pairs of cells of one shape whose measured samples do not overlap;
            clear_pairs_alike: the number of these pairs that are predicted in the measured order.
        median_error, worst_error: of |predicted / measured - 1| over all cells.
    """
    shape = itemgetter("model", "batch", "seq_len")
    clear = [
        (a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"])
        for one, other in combinations(rows, 2)
        for a, b in [sorted((one, other), key=itemgetter("measured_s"))]
        if shape(a) == shape(b) and a["measured_most_s"] < b["measured_least_s"]
    ]
    errors = [abs(row["relative_error"]) for row in rows]
    times = ([row[name] for row in rows] for name in ("measured_s", "predicted_s"))
    tau = float(scipy.stats.kendalltau(*times).statistic)
    return TABLES.record("agreement", tau=tau, clear=clear, errors=errors, median=median(errors))


#: by option that chooses a way, the parameters that only this way takes
_OF_WAYS: Mapping[str, Sequence[str]] = TABLES.forms["ways"]


def calibrated(
    scenario: str | None,
    table: str | None,
    quantity: str,
    fits: tuple[str, ...],
    engine: str | None,
    check: str | None,
    output: Path,
    device: str | None,
    world_size: int | None,
    precision: tuple[str, ...],
    logs: tuple[Path, ...],
    more_logs: tuple[Path, ...],
    extends: str | None,
    **sizes: tuple[int, ...],
) -> Output:
    """The output of `spbench calibrate`; the arguments are the options of the command.

    Raises:
        UserError: the options do not go together, or the way that the options choose raises one.
    """
    ways = {"--scenario": bool(scenario or table or fits), "--engine": bool(engine), "--from": bool(logs)}
    if sum(ways.values()) != 1:
        raise UserError("give either --scenario, --table and --fit, or --engine, or --from")
    if more_logs and not logs:
        raise UserError(f"{more_logs[0]}: it goes with --from FILE...")
    for way, names in _OF_WAYS.items():
        if not ways[way]:
            refuse_given(names, f"goes with {way}")
    if ways["--scenario"]:
        refuse_given(["output"], "goes with --engine or --from")
    if check and (engine != "distributed" or device == "cuda"):
        raise UserError("--check: it goes with --engine distributed, on CPUs")
    if logs:
        return cluster_from_logs([*logs, *more_logs], extends, output)
    if engine is not None:
        asked = MachineRequest(engine, "cpu" if check else device, world_size, precision, sizes)
        if check is not None:
            return checked_machine(asked, check, output)
        return measured_machine(asked, output)
    if scenario is None or table is None or not fits:
        raise UserError("--scenario, --table and --fit go together")
    return fitted_to_published(scenario, table, quantity, fits)


def cluster_from_logs(logs: Sequence[Path], extends: str | None, output: Path) -> Output:
    """Read the logs and write the cluster's file ``output``; nothing is written if a log is wrong.

    Raises:
        UserError: a log is of no known kind, damaged, or of another card; there is no cluster ``extends``.
    """
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    if extends is not None:
        refuse_unknown("--extends: no packaged cluster", extends, measure.cluster_names())
    if resolved(output) in [resolved(path) for path in logs]:
        raise UserError(f"--output {output} is one of the logs")
    base = measure.load_cluster(extends) if extends else None
    findings = {str(path): findings_of(path) for path in dict.fromkeys(logs)}
    cluster = cluster_of_logs(findings, base)
    words = ["spbench calibrate --from", *findings, *(["--extends", extends] if extends else [])]
    said = "".join(f"{comment(line)}\n" for line in [" ".join(words), *heading(cluster)])
    text = said + dump(cluster.content, width=110)
    # raises UserError where the file could not be read again
    measure.cluster_of_content(output, text.encode())
    write_whole(output, text)
    instead = (
        f"what {extends} says is used" if extends else "nothing is timed by them; --extends names a cluster"
    )
    missing = [f"still missing: {'; '.join(cluster.missing)}: {instead}"] if cluster.missing else []
    return Output(
        [Table(f"The cluster {output.stem}: what the logs say", cluster.fitted)],
        {
            "cluster": cluster.content,
            "figures": cluster.fitted,
            "missing": cluster.missing,
            "remarks": cluster.remarks,
        },
        cluster.fitted,
        notes=[
            *cluster.remarks,
            *missing,
            f"to see it by kind of work: spbench list cluster {output}",
            f"to simulate on it: spbench run --scenario NAME --cluster {output}",
        ],
        files=[output],
    )
