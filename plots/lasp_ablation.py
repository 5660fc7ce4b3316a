"""What fused kernels and kept states are worth, and the longest sequence that fits: LASP
(arXiv 2404.02882), ablations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.axes import Axes
from pandas import DataFrame

from spbench.plots.axes import length_text
from spbench.plots.bars import draw_rows, method_patches
from spbench.plots.drawing import Drawing
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.lines import PlottedQuantity, measured
from spbench.plots.marks import lost_notes
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
from spbench.plots.style import backend_name, looks, strategy_name

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


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """Memory and throughput of each combination; below them the longest sequences.

    Rows that neither set one of LASP's options nor search for the length are left out; the comparison is
    not used.
    """
    combined = [row for row in rows if set(_OPTIONS) & set(row["cell"].get("strategy_options") or {})]
    searches = [row for row in rows if searches_for(row, "seq_len")]
    lost = [row for row in [*combined, *searches] if row["status"] != "ok"]
    grid = PanelGrid(
        title(rows, "Kernel fusion, state caching and memory"), list(_notes(combined, searches)), lost
    )
    if combined:
        grid.add([[_combinations(combined, quantity)] for quantity in _QUANTITIES], abreast=2)
    if searches:
        grid.add([[_lengths(searches)]])
    return grid


def _combination(row: Row) -> str:
    """The name of the row's combination; both options are on unless they are turned off."""
    fusion, caching = (bool(option(row, "strategy_options", name, True)) for name in _OPTIONS)
    return _COMBINATIONS[fusion, caching]


def _combinations(rows: Sequence[Row], quantity: PlottedQuantity) -> Panel:
    known = {_combination(row): row for row in rows}
    shown = {name: [known[name]] for name in _COMBINATIONS.values() if name in known}
    draw_panel = partial(draw_rows, places=shown, value=quantity.value, quantity=quantity.column)
    return Panel(draw_panel, _shared_title(rows), y_label=quantity.axis_label, axis="linear")


def _lengths(rows: Sequence[Row]) -> Panel:
    """Bars of the strategies side by side for each way to save memory."""
    methods = sorted(set(map(strategy, rows)), key=lambda name: (name != "single", name))
    ways = {
        way: sorted(some, key=lambda row: methods.index(strategy(row)))
        for way, some in grouped(rows, _saving).items()
    }

    def draw_panel(ax: Axes) -> Drawn:
        drawn = draw_rows(ax, ways, _LENGTH.value, _LENGTH.column, _length_text)
        look = looks(methods)
        return replace(drawn, methods=method_patches({name: look[name] for name in methods}, _method))

    heading = f"{_shared_title(rows)}: longest sequence that fits"
    return Panel(draw_panel, heading, y_label=_LENGTH.axis_label, axis="linear")


def _length_text(value: float) -> str:
    return length_text(int(1024 * value))


def _saving(row: Row) -> str:
    """What saves memory besides the strategy."""
    checkpointing = option(row, "model_options", "checkpointing", False)
    return backend_name(backend(row)) + (",\nrecomputed" if checkpointing else "")


def _method(name: str) -> str:
    return "data parallel only" if name == "single" else strategy_name(name)


def _shared_title(rows: Sequence[Row]) -> str:
    """The model, the number of GPUs and the length, as far as all rows have the same."""
    length, counts = shared(rows, "seq_len"), gpu_counts(rows)
    parts = [shared(rows, "model"), f"{counts[0]} GPUs" if len(counts) == 1 else None]
    return ", ".join(map(str, filter(None, [*parts, f"{length_text(length)} tokens" if length else None])))


def _notes(combined: Sequence[Row], searches: Sequence[Row]) -> Iterator[str]:
    named = [(_combination(row).replace("\n", " "), row) for row in combined]
    named += [(f"{_method(strategy(row))}, {_saving(row)}".replace("\n", " "), row) for row in searches]
    return lost_notes(named)


draw = Drawing("lasp_ablation", _grid)
