"""What fused kernels and kept states are worth, and the longest sequence that fits: LASP
(arXiv 2404.02882), ablations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.along import length_text
from spbench.plots.bars import draw_rows
from spbench.plots.drawing import Drawing
from spbench.plots.lines import PlottedQuantity, measured
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes
from spbench.plots.series import (
    Row,
    backend,
    gpu_counts,
    grouped,
    option,
    searches_for,
    shared,
    strategy,
    title,
)
from spbench.plots.style import Look, backend_name, looks, strategy_name

_PANEL_INCHES = 2.1
_OPTIONS = ("kernel_fusion", "state_caching")

#: (kernels are fused, states are cached) -> the name of the combination, in the order of the bars
_COMBINATIONS = {
    (True, True): "fused,\ncached",
    (True, False): "fused",
    (False, True): "cached",
    (False, False): "neither",
}
_QUANTITIES = (
    PlottedQuantity("memory", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    PlottedQuantity("throughput", "Tokens per second", measured("tokens_per_s")),
)
_LENGTH = PlottedQuantity("length", "Longest sequence\n(K tokens, K = 1024)", measured("answer", 1024))


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """Memory and throughput of each combination; below them the longest sequences.

    Rows that neither set one of LASP's options nor search for the length are left out; the comparison is
    not used.
    """
    look = looks(map(strategy, rows))
    combined = [row for row in rows if set(_OPTIONS) & set(row["cell"].get("strategy_options") or {})]
    searches = [row for row in rows if searches_for(row, "seq_len")]
    page = Page(
        title(rows, "Kernel fusion, state caching and memory"),
        [_PANEL_INCHES] * (bool(combined) + bool(searches)),
        columns=len(_QUANTITIES),
        notes=list(_notes(combined, searches)),
    )
    handles: list[Artist] = []
    if combined:
        for column, quantity in enumerate(_QUANTITIES):
            _draw_combinations(page.panel(0, column), combined, look, quantity)
    if searches:
        handles += _draw_lengths(page.panel(int(bool(combined))), searches, look)
    return page.finish(handles, lost=[row for row in [*combined, *searches] if row["status"] != "ok"])


def _combination(row: Row) -> str:
    """The name of the row's combination; both options are on unless they are turned off."""
    fusion, caching = (bool(option(row, "strategy_options", name, True)) for name in _OPTIONS)
    return _COMBINATIONS[fusion, caching]


def _draw_combinations(
    ax: Axes, rows: Sequence[Row], look: dict[str, Look], quantity: PlottedQuantity
) -> None:
    known = {_combination(row): row for row in rows}
    shown = {name: [known[name]] for name in _COMBINATIONS.values() if name in known}
    draw_rows(ax, shown, look, quantity.value, quantity.column)
    ax.set_ylabel(quantity.axis_label)
    ax.set_title(_shared_title(rows))


def _draw_lengths(ax: Axes, rows: Sequence[Row], look: dict[str, Look]) -> list[Artist]:
    """Bars of the strategies side by side for each way to save memory; returns legend entries."""
    methods = sorted(set(map(strategy, rows)), key=lambda name: (name != "single", name))
    ways = {
        way: sorted(some, key=lambda row: methods.index(strategy(row)))
        for way, some in grouped(rows, _saving).items()
    }
    draw_rows(ax, ways, look, _LENGTH.value, _LENGTH.column, lambda value: length_text(int(1024 * value)))
    ax.set_ylabel(_LENGTH.axis_label)
    ax.set_title(f"{_shared_title(rows)}: longest sequence that fits")
    return [Patch(facecolor=look[name].color, label=_method(name)) for name in methods]


def _saving(row: Row) -> str:
    """What saves memory besides the strategy."""
    checkpointing = option(row, "model_options", "checkpointing", False)
    return backend_name(backend(row)) + (", checkpointing" if checkpointing else "")


def _method(name: str) -> str:
    return "data parallel only" if name == "single" else strategy_name(name)


def _shared_title(rows: Sequence[Row]) -> str:
    """The model, the number of GPUs and the length, as far as all rows have the same."""
    length, counts = shared(rows, "seq_len"), gpu_counts(rows)
    parts = [shared(rows, "model"), f"{counts[0]} GPUs" if len(counts) == 1 else None]
    return ", ".join(map(str, filter(None, [*parts, f"{length_text(length)} tokens" if length else None])))


def _notes(combined: Sequence[Row], searches: Sequence[Row]) -> Iterator[str]:
    named = [(_combination(row).replace("\n", " "), row) for row in combined]
    named += [(f"{_method(strategy(row))}, {_saving(row)}", row) for row in searches]
    return lost_notes(named)


draw = Drawing(__name__, _figure)
