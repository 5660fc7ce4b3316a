"""What fused kernels and kept states are worth, and the longest sequence that fits: LASP
(arXiv 2404.02882), ablations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.along import length_text
from spbench.plots.bars import draw_rows, lost_notes
from spbench.plots.lines import Value, measured
from spbench.plots.panel import mark_handles, note_lines, notes_height_inches, write_notes
from spbench.plots.series import Row, gpus, shared, title
from spbench.plots.style import (
    PAGE_INCHES,
    Look,
    add_legend,
    backend_name,
    house_style,
    looks,
    new_figure,
    save,
    strategy_name,
)

_PANEL_INCHES = 2.1
_OPTIONS = ("kernel_fusion", "state_caching")

#: (kernels are fused, states are cached) -> the name of the combination, in the order of the bars
_COMBINATIONS = {
    (True, True): "fused,\ncached",
    (True, False): "fused",
    (False, True): "cached",
    (False, False): "neither",
}

#: name in ids -> (axis, ours)
_QUANTITIES: dict[str, tuple[str, Value]] = {
    "memory": ("Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    "throughput": ("Tokens per second", measured("tokens_per_s")),
}
_LENGTH = measured("answer", 1024)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw lasp_ablation.png and lasp_ablation.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl; those with either option of LASP, and searches for the length.
        comparison: not used.
    """
    with house_style():
        return save(ablation_figure(rows), output, "lasp_ablation")


def ablation_figure(rows: Sequence[Row]) -> Figure:
    """Memory and throughput of each combination; below them the longest sequences."""
    look = looks(row["cell"]["strategy"] for row in rows)
    combined = [row for row in rows if any(name in _options(row) for name in _OPTIONS)]
    searches = [row for row in rows if (row["cell"].get("search") or {}).get("quantity") == "seq_len"]
    notes = note_lines(list(_notes(combined, searches)), PAGE_INCHES)
    heights = [_PANEL_INCHES] * (bool(combined) + bool(searches))
    heights += [notes_height_inches(notes)] * bool(notes)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, "Kernel fusion, state caching and memory"))
    if not heights:
        return figure
    grid = figure.add_gridspec(len(heights), len(_QUANTITIES), height_ratios=heights)
    handles: list[Artist] = []
    if combined:
        for column, name in enumerate(_QUANTITIES):
            _draw_combinations(figure.add_subplot(grid[0, column]), combined, look, name)
    if searches:
        handles += _draw_lengths(figure.add_subplot(grid[int(bool(combined)), :]), searches, look)
    if notes:
        write_notes(figure.add_subplot(grid[len(heights) - 1, :]), notes)
    lost = [row for row in [*combined, *searches] if row["status"] != "ok"]
    add_legend(figure, [*handles, *mark_handles(lost)])
    return figure


def _options(row: Row) -> dict[str, bool]:
    return row["cell"].get("strategy_options") or {}


def _combination(row: Row) -> tuple[bool, bool]:
    """Both are on unless they are turned off."""
    fusion, caching = (bool(_options(row).get(name, True)) for name in _OPTIONS)
    return fusion, caching


def _draw_combinations(ax: Axes, rows: Sequence[Row], look: dict[str, Look], quantity: str) -> None:
    axis_label, value = _QUANTITIES[quantity]
    known = {_combination(row): row for row in rows}
    shown = [combination for combination in _COMBINATIONS if combination in known]
    draw_rows(ax, {_COMBINATIONS[c]: [known[c]] for c in shown}, look, value, quantity)
    ax.set_ylabel(axis_label)
    ax.set_title(_shared_title(rows))


def _draw_lengths(ax: Axes, rows: Sequence[Row], look: dict[str, Look]) -> list[Artist]:
    """Bars of each strategy side by side, by what else saves memory; returns legend entries."""
    settings = dict.fromkeys(_saving(row) for row in rows)
    present = {row["cell"]["strategy"] for row in rows}
    methods = sorted(present, key=lambda name: (name != "single", name))
    beside = {
        setting: [
            row
            for name in methods
            for row in rows
            if row["cell"]["strategy"] == name and _saving(row) == setting
        ]
        for setting in settings
    }
    draw_rows(ax, beside, look, _LENGTH, "length", lambda value: length_text(int(1024 * value)))
    ax.set_ylabel("Longest sequence\n(K tokens, K = 1024)")
    ax.set_title(f"{_shared_title(rows)}: longest sequence that fits")
    return [Patch(facecolor=look[name].color, label=_method(name)) for name in methods]


def _saving(row: Row) -> str:
    """What else than the strategy saves memory."""
    checkpointing = (row["cell"].get("model_options") or {}).get("checkpointing", False)
    return backend_name(row["cell"]["training"]["backend"]) + (", checkpointing" if checkpointing else "")


def _method(strategy: str) -> str:
    return "data parallel only" if strategy == "single" else strategy_name(strategy)


def _shared_title(rows: Sequence[Row]) -> str:
    length, counts = shared(rows, "seq_len"), {gpus(row) for row in rows}
    parts = [shared(rows, "model"), f"{counts.pop()} GPUs" if len(counts) == 1 else None]
    return ", ".join(map(str, filter(None, [*parts, f"{length_text(length)} tokens" if length else None])))


def _notes(combined: Sequence[Row], searches: Sequence[Row]) -> Iterator[str]:
    named = [(_COMBINATIONS[_combination(row)].replace("\n", " "), row) for row in combined]
    named += [(f"{_method(row['cell']['strategy'])}, {_saving(row)}", row) for row in searches]
    return lost_notes(named)
