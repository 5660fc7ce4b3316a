"""The map of `spbench advise`: which strategy wins at which length on how many GPUs."""

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
_TIE, _NOTHING = "tie with another strategy", "nothing fits"


def draw_advice(points: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a field for each pair of GPUs and length, in the colour of the fastest strategy, hatched where
    another one ties with it, into a file of the type that its name says; returns the path.

    Args:
        points: with ``model``, ``cluster``, ``gpus``, ``seq_len``, ``strategy`` ("" where nothing fits),
            ``mesh`` and ``tie``, all of one model and cluster.

    Raises:
        ValueError: there is no such type of files.
    """
    return save_as(advice_map(points), path)


def advice_map(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of :func:`draw_advice`."""
    gpus = sorted({point["gpus"] for point in points})
    lengths = sorted({point["seq_len"] for point in points})
    strategies = sorted({point["strategy"] for point in points} - {""})
    colors = category_colors(strategies)
    with house_style():
        title = f"{points[0]['model']} on {points[0]['cluster']}: the fastest layout that fits"
        figure = new_figure(PAGE_INCHES, _AROUND_INCHES + _ROW_INCHES * len(gpus), title)
        ax = figure.add_subplot()
        for point in points:
            at = lengths.index(point["seq_len"]), gpus.index(point["gpus"])
            _field(ax, point, at, colors.get(point["strategy"], "white"))
        ax.set(xlim=(0, len(lengths)), ylim=(0, len(gpus)), xlabel="Sequence length", ylabel="GPUs")
        ax.set_xticks([i + 0.5 for i in range(len(lengths))], [_length(n) for n in lengths])
        ax.set_yticks([i + 0.5 for i in range(len(gpus))], [str(n) for n in gpus])
        ax.grid(visible=False)
        legend = [Patch(color=colors[name], label=name) for name in strategies]
        if any(point["tie"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=GREY, hatch="///", label=_TIE))
        if any(not point["strategy"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=INK, label=_NOTHING))
        add_legend(figure, legend)
        return figure


def _field(ax: Axes, point: Mapping[str, Any], at: tuple[int, int], color: Any) -> None:
    hatch = "///" if point["tie"] else None
    ax.add_patch(Rectangle(at, 1, 1, facecolor=color, edgecolor="white", linewidth=1, hatch=hatch))
    axes = point["mesh"].split("x")
    text = "\n".join("x".join(axes[i : i + 2]) for i in range(0, len(axes), 2)) or "-"
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
    ax.text(at[0] + 0.5, at[1] + 0.5, text, ha="center", va="center", fontsize=7, color=INK, bbox=box)


def _length(n: int) -> str:
    for suffix, factor in (("M", 2**20), ("K", 2**10)):
        if n % factor == 0:
            return f"{n // factor}{suffix}"
    return str(n)
