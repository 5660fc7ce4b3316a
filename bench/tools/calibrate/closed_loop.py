"""Predictions of cells on a cluster that was just measured, compared with the cells' measured times on real
ranks of the same machine. No prediction uses the cell's own measured time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Column, Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError
from spbench.bench.measure import Cluster, Narrowing, load_cluster, provenance, run_cell, trace_classes
from spbench.bench.tools.calibrate.machine_report import MachineRequest, measured_machine
from spbench.bench.tools.papers.answer import load_scenario


def checked_machine(asked: MachineRequest, scenario: str, output: Path) -> Output:
    """Measure this machine and a scenario's cells, and compare the cells' measured steps with the steps that
    are predicted on the measured cluster. Each number of ranks gets a cluster file, ``output`` with the
    number in its name.

    Raises:
        UserError: there is no such scenario, the scenario has fewer than two cells on the number of ranks, or
            :func:`measured_machine` raises one.
    """
    declared = Narrowing(engines=("distributed",), device="cpu").declared(load_scenario(scenario))
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
        cluster = load_cluster(str(path))
        of_size = [cell for cell in cells if cell.sizes.world == count]
        message(f"measuring and predicting {len(of_size)} cells on {count} rank{'s' if count > 1 else ''}")
        for cell, samples in zip(of_size, measured_samples(of_size), strict=True):
            rows.append(compared(cell, samples, predicted(cell, cluster)) | figures(cluster))
    made_by = {name: value for name, value in provenance().items() if name not in ("machine", "tree")}
    agreed = agreement(rows)
    title = "Step times in seconds, measured (median, least and most of the samples) and predicted"
    return Output(
        [Table.of(title, _COLUMNS, rows), str(agreed)],
        {"agreement": asdict(agreed), "cells": rows},
        [row | made_by for row in rows],
        notes=notes,
        files=files,
    )


#: the columns of the compared cells; times are in seconds
_COLUMNS = (
    Column("strategy", "strategy"),
    Column("ranks", "ranks"),
    Column("batch", "batch"),
    Column("length", "seq_len"),
    Column("measured", "measured_s", "{:.4f}".format),
    Column("least", "measured_least_s", "{:.4f}".format),
    Column("most", "measured_most_s", "{:.4f}".format),
    Column("predicted", "predicted_s", "{:.4f}".format),
    Column("error", "relative_error", "{:+.0%}".format),
    *(Column(name, f"{name}_s", "{:.4f}".format) for name in ("compute", "host", "communication")),
)


def figures(cluster: Cluster) -> dict[str, Any]:
    """The rates and latencies of a cluster that do not depend on a size, by name."""
    device, network = cluster.device, cluster.network
    return {
        "flops_per_s": device.peak_flops_per_s["fp32"].value,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s.value,
        "operator_s": None if cluster.host is None else cluster.host.operator_s.value,
        "latency_s": network.latency_s.value,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s.value,
    }


#: how often each cell is measured, with all other cells in between
ROUNDS = 2


def measured_samples(cells: Sequence[Cell]) -> list[list[float]]:
    """Samples of each cell's step in seconds, measured on real ranks; the cells take turns, so that a busy
    minute slows all of them. Raises the errors of :func:`run_cell`."""
    rounds = [[run_cell(cell).step_time_samples_s for cell in cells] for _ in range(ROUNDS)]
    return [[*chain.from_iterable(of_cell)] for of_cell in zip(*rounds, strict=True)]


def predicted(cell: Cell, cluster: Cluster) -> dict[str, float]:
    """The predicted step time of a cell on virtual ranks, and the parts of that time, in seconds."""
    timeline = trace_classes(cell, events=True).simulator(cluster)()
    return {"step_time_s": timeline.step_time_s, **timeline.breakdown}


def compared(cell: Cell, samples: Sequence[float], prediction: Mapping[str, float]) -> dict[str, Any]:
    """A row that compares a step's predicted seconds, and their parts (``prediction``), with the ``samples``
    of its measured seconds; ``relative_error`` is predicted / measured - 1."""
    batch, seq_len = cell.shape
    measured = median(samples)
    return {
        "model": cell.model,
        "strategy": cell.strategy,
        "ranks": cell.sizes.world,
        "batch": batch,
        "seq_len": seq_len,
        "measured_s": measured,
        "measured_least_s": min(samples),
        "measured_most_s": max(samples),
        "predicted_s": prediction["step_time_s"],
        "relative_error": prediction["step_time_s"] / measured - 1,
        "compute_s": prediction["compute_s"],
        "host_s": prediction.get("host_s", 0.0) + prediction["overhead_s"],
        "communication_s": prediction["exposed_communication_s"] + prediction["bubble_s"],
    }


@dataclass(frozen=True)
class Agreement:
    """The agreement of the predicted times, and of their order, with the measured times.

    Attributes:
        tau: Kendall's tau over all cells.
        clear_pairs: the number of pairs of cells of one shape whose measured samples do not overlap;
            clear_pairs_alike: the number of these pairs that are predicted in the measured order.
        median_error, worst_error: of |predicted / measured - 1| over all cells.
    """

    tau: float
    clear_pairs: int
    clear_pairs_alike: int
    median_error: float
    worst_error: float

    def __str__(self) -> str:
        return (
            f"error: median {self.median_error:.0%}, worst {self.worst_error:.0%}; Kendall's tau "
            f"{self.tau:.2f}; of pairs of one shape whose samples do not overlap "
            f"{self.clear_pairs_alike} of {self.clear_pairs} in the measured order"
        )


def agreement(rows: Sequence[Mapping[str, Any]]) -> Agreement:
    """The agreement of two or more cells' rows, which :func:`compared` makes."""
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
    return Agreement(tau, len(clear), sum(clear), median(errors), max(errors))
