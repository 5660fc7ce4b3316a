"""Figures of `spbench fit` (a rank's memory over its steps), and of `spbench advise` (the parts of layouts'
step times, and the fastest layouts by length and GPUs)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from spbench.plots.paper import PAGE_INCHES, add_legend, house_style, new_figure, save_as
from spbench.plots.style import (
    GREY,
    INK,
    backend_name,
    binary_length,
    category_colors,
    looks,
    model_name,
    strategy_name,
)

# -- a rank's memory -------------------------------------------------------------------------------------

_GIB = 2**30
#: the kinds of tensors from the bottom to the top, those that live longest first
_ORDER = (
    *("parameters", "optimizer_state", "gradients", "inputs", "workspaces"),
    *("activations", "communication_buffers", "temporaries"),
)
#: the least part of the x axis that a phase must have to be named
_NARROW = 0.06


def draw_memory(anatomy: Mapping[str, Any], usable_bytes: int, title: str, path: Path) -> Path:
    """Draw a rank's memory into a file, whose type is the ending of ``path``; returns the path.

    Args:
        anatomy: the fields of an :class:`Anatomy` as plain data.
        usable_bytes: the card's usable memory, drawn as a line.

    Raises:
        ValueError: figures cannot be written as files of this type.
    """
    with house_style():
        figure = new_figure(PAGE_INCHES, 3.2, title)
        ax = figure.add_subplot()
        shown = _draw_kinds(ax, anatomy["curve"])
        peak = anatomy["peak_memory_bytes"] / _GIB
        usable = usable_bytes / _GIB
        ax.axhline(usable, color=INK, linewidth=1, linestyle="--")
        place: Any = ("axes fraction", "data")
        ax.annotate(f"usable {usable:.1f} GiB", (0.995, usable), xycoords=place, ha="right", va="bottom")
        ax.set(xlim=(0, anatomy["events"]), ylim=(0, 1.15 * max(peak, usable)))
        ax.set(xlabel="Allocations and frees, in order", ylabel="Allocated (GiB)")
        _mark_peak(ax, anatomy, peak)
        _name_phases(ax, anatomy["phases"], anatomy["events"])
        add_legend(figure, shown)
    return save_as(figure, path)


def _draw_kinds(ax: Axes, curve: Mapping[str, Sequence[int]]) -> list[Patch]:
    """Draw the bytes of the kinds of tensors, stacked; returns the patches of the legend."""
    colors = category_colors(_ORDER)
    kinds = [kind for kind in _ORDER if kind in curve]
    heights = [np.asarray(curve[kind]) / _GIB for kind in kinds]
    ax.stackplot(curve["event"], heights, colors=[colors[kind] for kind in kinds], linewidth=0)
    return [Patch(color=colors[kind], label=kind.replace("_", " ")) for kind in kinds]


def _mark_peak(ax: Axes, anatomy: Mapping[str, Any], peak: float) -> None:
    curve = anatomy["curve"]
    totals = np.sum([values for kind, values in curve.items() if kind != "event"], axis=0)
    at = curve["event"][int(np.argmax(totals))]
    ax.plot([at], [peak], marker="v", color=INK, markersize=5, clip_on=False)
    left = at < anatomy["events"] / 2
    ax.annotate(
        f"peak {peak:.1f} GiB",
        (at, peak),
        xytext=(6 if left else -6, 3),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
    )


def _name_phases(ax: Axes, phases: Sequence[Sequence[Any]], events: int) -> None:
    """Draw a line where each phase begins, and write the names of wide phases above the axes."""
    starts = [first for _, first in phases] + [events]
    for (name, first), end in zip(phases, starts[1:], strict=True):
        ax.axvline(first, color=GREY, linewidth=0.4, alpha=0.6)
        if end - first > _NARROW * events:
            at = ((first + end) / 2, 1.01)
            ax.annotate(name, at, xycoords=("data", "axes fraction"), ha="center", fontsize=6.5)


# -- layouts beside their floors -------------------------------------------------------------------------

#: the height in inches of a layout's bar, and of the rest of the figure
_BAR_INCHES, _AROUND_BARS_INCHES = 0.42, 0.9
#: the lower bounds of a step's time: the label and the line style of each
_FLOORS: Mapping[str, tuple[str, Any]] = {
    "compute_floor_s": ("floor: the model's FLOPs", "-"),
    "links_floor_s": ("floor: bytes sent", ":"),
}
_OTHER = "other"


def draw_layouts(title: str, layouts: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a bar for each layout, the best at the top, into a file, whose type is the ending of ``path``;
    returns the path.

    Args:
        layouts: mappings with ``strategy``, ``mesh``, ``backend``, ``step_time_s``, ``step_time_low_s`` and
            ``step_time_high_s`` (or None), ``parts`` (seconds by name), ``compute_floor_s`` and
            ``links_floor_s`` (or None).

    Raises:
        ValueError: figures cannot be written as files of this type.
    """
    return save_as(layouts_figure(title, layouts), path)


def layouts_figure(title: str, layouts: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure that :func:`draw_layouts` writes."""
    parts = [*dict.fromkeys(name for each in layouts for name, s in each["parts"].items() if s > 0)]
    colors = category_colors(parts) | {_OTHER: GREY}
    with house_style():
        figure = new_figure(PAGE_INCHES, _AROUND_BARS_INCHES + _BAR_INCHES * len(layouts), title)
        ax = figure.add_subplot()
        shown: set[str] = set()
        for at, layout in enumerate(layouts):
            step_s, begin = layout["step_time_s"], 0.0
            rest = max(0.0, step_s - sum(layout["parts"].values()))
            for name, seconds in {**layout["parts"], _OTHER: rest}.items():
                if seconds > 0.002 * step_s:
                    ax.barh(at, seconds, left=begin, height=0.6, color=colors[name], edgecolor="white")
                    begin += seconds
                    shown.add(name)
            if layout["step_time_low_s"] is not None:
                ends = [[step_s - layout["step_time_low_s"]], [layout["step_time_high_s"] - step_s]]
                ax.errorbar(step_s, at, xerr=ends, color=INK, linewidth=0.8, capsize=2)
            for name, (_, style) in _FLOORS.items():
                if layout[name] is not None:
                    ax.plot(
                        [layout[name]] * 2, [at - 0.42, at + 0.42], color=INK, linestyle=style, linewidth=1
                    )
        names = [
            f"{strategy_name(each['strategy'])}\n{each['mesh']}, {backend_name(each['backend'])}"
            for each in layouts
        ]
        ax.set_yticks(range(len(layouts)), names)
        ax.set(xlim=(0, None), ylim=(len(layouts) - 0.5, -0.5), xlabel="Seconds of a step")
        ax.grid(visible=False, axis="y")
        legend: list[Any] = [
            Patch(color=colors[name], label=name) for name in [*parts, _OTHER] if name in shown
        ]
        legend += [Line2D([], [], color=INK, linestyle=s, label=label) for label, s in _FLOORS.values()]
        add_legend(figure, legend)
        return figure


# -- which strategy wins where ---------------------------------------------------------------------------

#: the height in inches of a row of the map, and of the rest of the figure
_ROW_INCHES, _AROUND_INCHES = 0.45, 1.5
#: the fields that can vary between answers, with their labels
_AXES = {"gpus": "GPUs", "seq_len": "Sequence length", "figures": "Figure of the cluster"}
_TIE, _NOTHING = "tie with another strategy", "nothing fits"


def draw_advice(points: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a field for each answer, in the colour of the fastest strategy, hatched if another strategy ties
    with the fastest, into a file, whose type is the ending of ``path``; returns the path.

    Args:
        points: answers with ``model``, ``cluster``, ``gpus``, ``seq_len``, ``figures`` (changed rates of the
            cluster, as text), ``strategy`` ("" where nothing fits), ``mesh`` and ``tie``. All are of one
            model; at most two of ``gpus``, ``seq_len`` and ``figures`` vary.

    Raises:
        ValueError: figures cannot be written as files of this type.
    """
    return save_as(advice_map(points), path)


def advice_map(points: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure that :func:`draw_advice` writes."""
    across, down = _axes(points)
    columns, rows = ([*dict.fromkeys(point[name] for point in points)] for name in (across, down))
    colors = {
        name: look.color for name, look in looks({point["strategy"] for point in points} - {""}).items()
    }
    with house_style():
        cluster = points[0]["cluster"].split(" with ")[0] if across == "figures" else points[0]["cluster"]
        title = f"{model_name(points[0]['model'])} on {cluster}: the fastest layout that fits"
        figure = new_figure(PAGE_INCHES, _AROUND_INCHES + _ROW_INCHES * len(rows), title)
        ax = figure.add_subplot()
        for point in points:
            at = columns.index(point[across]), rows.index(point[down])
            _field(ax, point, at, colors.get(point["strategy"], "white"))
        ax.set(xlim=(0, len(columns)), ylim=(0, len(rows)), xlabel=_AXES[across], ylabel=_AXES[down])
        ax.set_xticks([i + 0.5 for i in range(len(columns))], [_tick(across, each) for each in columns])
        ax.set_yticks([i + 0.5 for i in range(len(rows))], [_tick(down, each) for each in rows])
        ax.grid(visible=False)
        legend = [Patch(color=color, label=strategy_name(name)) for name, color in colors.items()]
        if any(point["tie"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=GREY, hatch="///", label=_TIE))
        if any(not point["strategy"] for point in points):
            legend.append(Patch(facecolor="white", edgecolor=INK, label=_NOTHING))
        add_legend(figure, legend)
        return figure


def _axes(points: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The names of the fields along x and y: the two fields that vary, or else ``seq_len`` and ``gpus``."""
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
    return binary_length(value) if name == "seq_len" else str(value)
