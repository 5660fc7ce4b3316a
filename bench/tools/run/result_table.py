"""The tables of a run: what its cells have measured, and the published numbers beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Table
from spbench.bench.measure.sweep.results import Row, flat
from spbench.bench.measure.trust.bands import TIE, shown_band, tied
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.tools.papers.paper_findings import compared
from spbench.bench.units import shown_share, three_digits
from spbench.plots.series import differing

_GIB, _MIB = 2**30, 2**20

#: columns of what was searched for
_SEARCHED = ("max seq_len", "max batch")

#: shares of a simulated step that have columns of their own, by the parts of its breakdown
_SHARES = {
    "compute": ("compute_s",),
    "exposed": ("exposed_communication_s",),
    "bubble": ("bubble_s",),
    "host": ("overhead_s", "host_s"),
}

#: what tells rows apart and what people look for first, in the order in which a terminal gives them room
_IMPORTANT = (
    *("model", "strategy", "GPUs", "mesh", "options", *_SEARCHED, "batch", "seq_len", "step", "status"),
    *("peak GiB", "tokens/s", "MFU", "reserved GiB", "sent MiB/GPU"),
)

#: shown once in the title where all rows agree
_SHARED = ("batch", "seq_len", "precision", "cluster", "engine", "variant")


def result_table(title: str, rows: Sequence[Row]) -> Table:
    """A line for each row, with a column for each loss of the models trained, and two where cells differ in
    the mesh and not in the number of GPUs: the mesh, and what a GPU sends along its axes; what all rows have
    in common stands in the title. A terminal counts the rows that are unsupported by their reasons."""
    flats = [flat(row) for row in rows]
    shared = {name: flats[0][name] for name in _SHARED if len({entry[name] for entry in flats}) == 1}
    options = _options([Cell.model_validate(row["cell"]) for row in rows])
    by_gpus = {tuple(entry[name] for name in ("model", "strategy", "world_size")) for entry in flats}
    by_mesh = {tuple(entry[name] for name in ("model", "strategy", "mesh")) for entry in flats}
    losses = [_last_losses(row) for row in rows]
    names = list(dict.fromkeys(name for of_row in losses for name in of_row))
    wrong = list(dict.fromkeys(name for row in rows for name in row["measurement"].get("errors") or ()))
    lines = []
    split = len(by_mesh) > len(by_gpus)
    ties = tied(rows)
    for row, entry, option, of_row, tie in zip(rows, flats, options, losses, ties, strict=True):
        line: dict[str, Any] = {name: entry[name] for name in ("model", "strategy")}
        line["GPUs"] = entry["world_size"]
        if split:
            line["mesh"] = entry["mesh"]
        line["options"] = option
        line |= {name: entry[name] for name in _SHARED if name not in shared}
        line |= dict(_measured(entry, tie))
        if split:
            line["MiB by axis"] = _sent_by_axis(row)
        errors = row["measurement"].get("errors") or {}
        line |= {f"error {name}": f"{errors[name]:.1e}" if name in errors else None for name in wrong}
        line |= {f"last {name} loss": f"{of_row[name]:.6f}" if name in of_row else None for name in names}
        line["status"] = entry["status"]
        timed = entry["status"] == "ok" and entry.get("step_time_s")
        line["reason"] = None if timed else entry["reason"] or None
        lines.append(line)
    common = ", ".join(f"{name} {value}" for name, value in shared.items() if value not in (None, ""))
    return Table(f"{title} ({common})", lines, _IMPORTANT, ("options", "reason"), _unsupported(rows))


def _unsupported(rows: Sequence[Row]) -> dict[int, str]:
    """The rows that are unsupported, by their index, with the reason and the strategies that share it."""
    reasons = {
        index: f"unsupported: {row['reason']}"
        for index, row in enumerate(rows)
        if row["status"] == "unsupported"
    }
    sharing: dict[str, dict[str, None]] = {}
    for index, reason in reasons.items():
        sharing.setdefault(reason, {})[rows[index]["cell"]["strategy"]] = None
    return {index: f"{reason} ({', '.join(sharing[reason])})" for index, reason in reasons.items()}


def _measured(entry: Mapping[str, Any], tie: bool | None) -> Iterator[tuple[str, Any]]:
    """The columns of what was measured, from a flat row."""
    for quantity in ("seq_len", "batch"):
        yield f"max {quantity}", entry.get("answer") if entry["searched"] == quantity else None
    yield "peak GiB", _scaled(entry.get("peak_memory_bytes"), _GIB)
    yield "reserved GiB", _scaled(entry.get("reserved_memory_bytes"), _GIB)
    yield "host GiB a node", _scaled(entry.get("node_host_memory_bytes"), _GIB)
    sent, formula = entry["sent_bytes"], entry["formula_sent_bytes"]
    yield "sent MiB/GPU", _scaled(sent, _MIB)
    yield "imbalance", entry.get("imbalance") and f"{entry['imbalance']:.2f}"
    # an N-th of a payload may be a fraction of a byte, and such sums are rounded by their order
    same = formula == sent or (formula and sent and abs(formula - sent) < 0.5)
    yield "by formula", None if same else _scaled(formula, _MIB)
    step_time_s = entry.get("step_time_s")
    yield "step", shown_band(entry) + (f" {TIE}" if tie else "")
    yield "tokens/s", entry.get("tokens_per_s") and three_digits(entry["tokens_per_s"])
    yield "MFU", entry.get("mfu") and f"{three_digits(100 * entry['mfu'])}%"
    for name, parts in _SHARES.items():
        seconds = sum(entry.get(part) or 0 for part in parts)
        share = seconds / step_time_s if step_time_s else 0.0
        yield name, shown_share(share) if share >= 0.005 else None
    yield "bound", entry.get("bound")
    yield "steps", entry.get("last_step")


def _sent_by_axis(row: Row) -> str:
    """MiB that a GPU sends over the ranks along each axis, or along several, as "tp 5760.00, dp_sp 1.20"."""
    sent: dict[str, float] = {}
    for entry in row["measurement"].get("communication") or ():
        sent[entry["axis"]] = sent.get(entry["axis"], 0) + entry["sent_bytes"]
    return ", ".join(f"{axis} {_scaled(nbytes, _MIB)}" for axis, nbytes in sent.items() if nbytes)


def _last_losses(row: Row) -> dict[str, float]:
    """The losses of a training run's last step, by the names that its model gives them."""
    steps = row["measurement"].get("losses")
    return {name: loss for name, loss in steps[-1].items() if name != "step"} if steps else {}


def _scaled(nbytes: float | None, unit: int) -> str | None:
    if nbytes is None:
        return None
    return f"{nbytes / unit:.2f}" if nbytes >= unit / 10 or nbytes == 0 else f"{nbytes / unit:.2g}"


def _options(cells: Sequence[Cell]) -> list[str]:
    """Of each cell, the options and training settings in which it differs from others that the table would
    show alike; empty texts where there are no such cells."""
    shown = [(c.model, c.strategy, c.mesh_text, *(getattr(c, name) for name in _SHARED)) for c in cells]
    if len(set(shown)) == len(cells):
        return [""] * len(cells)
    settings = [{**c.model_options, **c.strategy_options, **c.training.model_dump()} for c in cells]
    names = differing(settings)
    return [" ".join(f"{n}={has[n]}" for n in names if has.get(n) is not None) for has in settings]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """A line for each published number, ours beside it."""
    lines = [{"claim": c.claim, "variant": c.variant, **compared(vars(c))} for c in comparisons]
    title = "Published and ours (relative error: ours / published - 1)"
    return Table(title, lines, ("claim", "published", "ours", "relative error", "role"), ("claim", "note"))
