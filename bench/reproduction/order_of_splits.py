"""Are the ways to split a run in the right order? Kendall's tau of published and simulated times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.reproduction.findings import Line, Record, table_of

#: the quantity of which splits are compared, by sample of the batch
STEP_TIME = "step_time_ms"


def order_lines(records: Iterable[Record], cells: Mapping[str, Cell]) -> list[Line]:
    """A line for each of a table's runs (one model, options, length, number of GPUs) that was split in
    several ways: how many, tau (1: the same order, -1: the reverse), the fastest split as published and as
    simulated, and how much longer than the fastest the latter's published time is."""
    runs: dict[tuple[Any, ...], list[tuple[Cell, float, float]]] = {}
    for record in records:
        cell, published, ours = cells.get(record["cell"]), record["published"], record["reproduced"]
        if record["quantity"] != STEP_TIME or cell is None or published is None or ours is None:
            continue
        batch = cell.batch or 1
        options = sorted((k, v) for k, v in cell.model_options.items() if not k.startswith("recompute"))
        run = (
            table_of(record),
            cell.model,
            str(options),
            cell.seq_len,
            cell.sizes.world,
            cell.cluster,
            cell.variant,
        )
        runs.setdefault(run, []).append((cell, published / batch, ours / batch))
    return [_line(run, times) for run, times in runs.items() if len({_split(c) for c, _, _ in times}) > 1]


def _split(cell: Cell) -> str:
    return f"{cell.strategy} {cell.mesh_text}"


def _line(run: tuple[Any, ...], times: Sequence[tuple[Cell, float, float]]) -> Line:
    table, model, _, seq_len, world, cluster, _ = run
    fastest = min(times, key=lambda each: each[1])
    chosen = min(times, key=lambda each: each[2])
    return {
        "table": table,
        "model": model,
        "cluster": cluster,
        "seq_len": seq_len,
        "GPUs": world,
        "splits": len(times),
        "tau": f"{kendall_tau([(a, b) for _, a, b in times]):.2f}",
        "fastest published": fastest[0].mesh_text,
        "fastest ours": chosen[0].mesh_text,
        "published time of ours": f"{chosen[1] / fastest[1] - 1:+.1%}",
    }


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Of pairs of numbers, two at least, the share of two that are in the same order less the share of those
    in the reverse; a tie is neither."""
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum(signs) / len(signs)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
