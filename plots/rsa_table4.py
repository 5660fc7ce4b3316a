"""Memory and throughput of weak scaling, published and ours: RSA (arXiv 2105.13120), Table 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame, isna

from spbench.plots.lines import Value, draw_values, highest, measured, without
from spbench.plots.panel import (
    gpu_axis,
    mark_handles,
    mark_missing,
    note_lines,
    notes_height_inches,
    value_axis,
    write_notes,
)
from spbench.plots.series import Row, gpu_counts, gpus, series_of, shared, title
from spbench.plots.style import (
    INK,
    PAGE_INCHES,
    add_legend,
    house_style,
    looks,
    new_figure,
    save,
    strategy_name,
)

_PANEL_INCHES = 2.2
_MIB = 2**20

#: quantity of the published table -> (axis, ours)
_QUANTITIES: dict[str, tuple[str, Value]] = {
    "memory_mb": ("Peak memory (MiB)", measured("peak_memory_bytes", _MIB)),
    "throughput_tokens_per_s": ("Tokens per second", measured("tokens_per_s")),
}


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw rsa_table4.png and rsa_table4.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, each of a weak scaling.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        return save(table4_figure(rows, comparison), output, "rsa_table4")


def weak_scalings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by what each GPU has to do, the batch's scaling first: those of one scaling have one number
    of tokens a GPU."""
    found: dict[float, list[Row]] = {}
    for row in rows:
        cell = row["cell"]
        found.setdefault(cell["batch"] * cell["seq_len"] / gpus(row), []).append(row)
    scalings = sorted(found.values(), key=lambda some: shared(some, "seq_len") is None)
    return {_title(some): some for some in scalings}


def table4_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A column for each weak scaling, a row of panels for each quantity."""
    scalings = weak_scalings(rows)
    look = looks(row["cell"]["strategy"] for row in rows)
    notes = note_lines(_statuses(comparison), PAGE_INCHES)
    heights = [_PANEL_INCHES] * len(_QUANTITIES) * bool(rows)
    heights += [notes_height_inches(notes)] * bool(notes)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, "Weak scaling with pipeline stages"))
    if not rows:
        return figure
    grid = figure.add_gridspec(len(heights), len(scalings), height_ratios=heights)
    handles: list[Artist] = []
    for index, (quantity, (label, ours)) in enumerate(_QUANTITIES.items()):
        published = _published(comparison, quantity)
        top = max(highest(rows, ours), highest(rows, published))
        for column, (name, some) in enumerate(scalings.items()):
            ax = figure.add_subplot(grid[index, column])
            series = series_of(some, look, apart_from=("batch", "seq_len"))
            handles += draw_values(ax, series, look, ours, f"ours {quantity}", linestyle="-")
            if any(published(row) is not None for row in some):
                # rings around our marks: where the two agree both are seen
                draw_values(
                    ax,
                    series,
                    look,
                    published,
                    f"published {quantity}",
                    linestyle=":",
                    markersize=9,
                    markerfacecolor="none",
                    zorder=2.5,
                )
                handles.append(_published_handle())
            missing = without(series, ours)
            gpu_axis(ax, gpu_counts(some))
            # one scale for a quantity, so that the two scalings can be compared
            value_axis(ax, top, marks=any(row["status"] != "ok" for row in rows))
            mark_missing(ax, missing, look)
            ax.set_xlabel("Number of GPUs" if index == len(_QUANTITIES) - 1 else "")
            ax.set_ylabel(label if column == 0 else "")
            if index == 0:
                ax.set_title(name)
    if notes:
        write_notes(figure.add_subplot(grid[len(_QUANTITIES), :]), notes)
    add_legend(figure, [*handles, *mark_handles([row for row in rows if row["status"] != "ok"])])
    return figure


def _title(rows: Sequence[Row]) -> str:
    grown = [("batch", "batch"), ("seq_len", "sequence length")]
    texts = []
    for field, name in grown:
        values = sorted({row["cell"][field] for row in rows})
        texts.append(f"{name} {values[0]}" + (f" to {values[-1]}" if len(values) > 1 else ""))
    return ", ".join(texts)


def _published(comparison: DataFrame, quantity: str) -> Value:
    """What was published of a row."""
    known = {}
    if not comparison.empty:
        of_quantity = comparison[comparison["quantity"] == quantity]
        known = {entry["cell"]: entry["published"] for entry in of_quantity.to_dict("records")}

    def value(row: Row) -> float | None:
        found = known.get(row["key"])
        return None if found is None or isna(found) else float(found)

    return value


def _statuses(comparison: DataFrame) -> list[str]:
    """A line for each cell that one side, or both, could not run."""
    if comparison.empty:
        return []
    lines = {}
    for entry in comparison.to_dict("records"):
        statuses = entry["status_published"], entry["status_reproduced"]
        if statuses != ("ok", "ok") and all(statuses):
            where = " ".join(entry["cell"].split("/")[2:5])
            name = strategy_name(entry["strategy"])
            lines[entry["cell"]] = f"{name}, {where}: published {statuses[0]}, ours {statuses[1]}"
    return list(lines.values())


def _published_handle() -> Line2D:
    return Line2D(
        [], [], color=INK, linestyle=":", marker="o", markersize=9, markerfacecolor="none", label="published"
    )
