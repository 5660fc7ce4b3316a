"""The map of `spbench advise`: which strategy wins where, of lengths, GPUs and a figure of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from spbench.plots.paper import PAGE_INCHES, add_legend, house_style, new_figure, save_as
from spbench.plots.style import GREY, INK, category_colors

#: inches of a row of the map, and of all around the rows
_ROW_INCHES, _AROUND_INCHES = 0.45, 1.5
#: what can vary from answer to answer
_AXES = {"gpus": "GPUs", "seq_len": "Sequence length", "figures": "Figure of the cluster"}
_TIE, _NOTHING = "tie with another strategy", "nothing fits"


def draw_advice(points: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a field for each answer, in the colour of the fastest strategy, hatched where another one ties
    with it, into a file of the type that its name says; returns the path.

    Args:
        points: with ``model``, ``cluster``, ``gpus``, ``seq_len``, ``figures`` (of the cluster, as text),
            ``strategy`` ("" where nothing fits), ``mesh`` and ``tie``, all of one model; of ``gpus``,
            ``seq_len`` and ``figures`` two vary at the most.

    Raises:
        ValueError: there is no such type of files.
    """
    return save_as(advice_map(points), path)


def advice_map(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of :func:`draw_advice`."""
    across, down = _axes(points)
    columns, rows = ([*dict.fromkeys(point[name] for point in points)] for name in (across, down))
    strategies = sorted({point["strategy"] for point in points} - {""})
    colors = category_colors(strategies)
    with house_style():
        cluster = points[0]["cluster"].split(" with ")[0] if across == "figures" else points[0]["cluster"]
        title = f"{points[0]['model']} on {cluster}: the fastest layout that fits"
        figure = new_figure(PAGE_INCHES, _AROUND_INCHES + _ROW_INCHES * len(rows), title)
        ax = figure.add_subplot()
        for point in points:
            at = columns.index(point[across]), rows.index(point[down])
            _field(ax, point, at, colors.get(point["strategy"], "white"))
        ax.set(xlim=(0, len(columns)), ylim=(0, len(rows)), xlabel=_AXES[across], ylabel=_AXES[down])
        ax.set_xticks([i + 0.5 for i in range(len(columns))], [_tick(across, each) for each in columns])
        ax.set_yticks([i + 0.5 for i in range(len(rows))], [_tick(down, each) for each in rows])
        ax.grid(visible=False)
        legend = [Patch(color=colors[name], label=name) for name in strategies]
        if any(point["tie"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=GREY, hatch="///", label=_TIE))
        if any(not point["strategy"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=INK, label=_NOTHING))
        add_legend(figure, legend)
        return figure


def _axes(points: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """What is drawn across and down: the two that vary, or else lengths over GPUs."""
    varying = [name for name in _AXES if len({point[name] for point in points}) > 1]
    across = varying[-1] if "figures" in varying else "seq_len"
    return across, next((name for name in varying if name != across), "gpus")


def _field(ax: Axes, point: Mapping[str, Any], at: tuple[int, int], color: Any) -> None:
    hatch = "///" if point["tie"] else None
    ax.add_patch(Rectangle(at, 1, 1, facecolor=color, edgecolor="white", linewidth=1, hatch=hatch))
    axes = point["mesh"].split("x")
    text = "\n".join("x".join(axes[i : i + 2]) for i in range(0, len(axes), 2)) or "-"
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
    ax.text(at[0] + 0.5, at[1] + 0.5, text, ha="center", va="center", fontsize=7, color=INK, bbox=box)


def _tick(name: str, value: Any) -> str:
    if name == "figures":
        words = [text.rpartition(".")[2].replace("=", " ") for text in str(value).split(",")]
        return "\n".join(words) or "as it is"
    return _length(value) if name == "seq_len" else str(value)


def _length(n: int) -> str:
    for suffix, factor in (("M", 2**20), ("K", 2**10)):
        if n % factor == 0:
            return f"{n // factor}{suffix}"
    return str(n)
