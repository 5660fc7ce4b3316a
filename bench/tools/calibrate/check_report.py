"""`spbench calibrate --check SCENARIO`: measure the machine, then a scenario's cells, and predict these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.measure.sweep.provenance import provenance
from spbench.bench.tools.calibrate.closed_loop import Compared, agreement, closed_loop
from spbench.bench.tools.calibrate.machine_report import MachineRequest, measured_machine
from spbench.bench.tools.papers.answer import load_scenario


def checked_machine(asked: MachineRequest, scenario: str, output: Path) -> Output:
    """Write a cluster file for each number of ranks that the cells have, ``output`` with the number in its
    name, and set the cells' measured steps beside those that the files predict.

    Raises:
        UserError: there is no such scenario, it has no two cells of the number of ranks asked for, or as
            :func:`measured_machine`.
    """
    declared = declared_cells(load_scenario(scenario), Narrowing(engines=("distributed",), device="cpu"))
    cells = [cell for cell in declared if asked.world_size in (None, cell.sizes.world)]
    if len(cells) < 2:
        ranks = "" if asked.world_size is None else f" on {asked.world_size} ranks"
        raise UserError(f"--check {scenario}: it has {len(cells)} cells{ranks}, and an order needs two")
    load = os.getloadavg()[0]
    notes = [f"load of the machine before: {load:.2f}"]
    files: list[Path] = []
    rows: list[Compared] = []
    records: list[dict[str, Any]] = []
    for count in sorted({cell.sizes.world for cell in cells}):
        path = output.with_name(f"{output.stem}-{count}.yaml")
        made = measured_machine(replace(asked, world_size=count), path)
        files += made.files
        notes += [f"{count} ranks: {note}" for note in made.notes[:-1]]
        cluster = load_cluster(str(path))
        of_size = [cell for cell in cells if cell.sizes.world == count]
        message(f"measuring and predicting {len(of_size)} cells on {count} rank{'s' if count > 1 else ''}")
        for row in closed_loop(of_size, cluster):
            rows.append(row)
            records.append(asdict(row) | figures(cluster))
    made_by = {name: value for name, value in provenance().items() if name not in ("machine", "tree")}
    found = agreement(rows)
    return Output(
        [_table(rows), str(found)],
        {"agreement": asdict(found), "cells": records},
        [record | made_by for record in records],
        notes=notes,
        files=files,
    )


def _table(rows: Sequence[Compared]) -> Table:
    lines = [
        {
            "strategy": row.strategy,
            "ranks": row.ranks,
            "batch": row.batch,
            "length": row.seq_len,
            "measured": f"{row.measured_s:.4f}",
            "least": f"{row.measured_least_s:.4f}",
            "most": f"{row.measured_most_s:.4f}",
            "predicted": f"{row.predicted_s:.4f}",
            "error": f"{row.relative_error:+.0%}",
            "compute": f"{row.compute_s:.4f}",
            "host": f"{row.host_s:.4f}",
            "communication": f"{row.communication_s:.4f}",
        }
        for row in rows
    ]
    return Table(
        "Step times in seconds, measured (median, least and most of the samples) and predicted", lines
    )


def figures(cluster: Cluster) -> dict[str, Any]:
    """The figures that do not depend on size."""
    device, network = cluster.device, cluster.network
    return {
        "flops_per_s": device.peak_flops_per_s["fp32"].value,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s.value,
        "operator_s": None if cluster.host is None else cluster.host.operator_s.value,
        "latency_s": network.latency_s.value,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s.value,
    }
