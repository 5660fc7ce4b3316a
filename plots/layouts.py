"""The layouts of one answer of `spbench advise`: what their steps are made of, beside their floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from spbench.plots.paper import PAGE_INCHES, add_legend, house_style, new_figure, save_as
from spbench.plots.style import GREY, INK, category_colors

#: inches of a layout, and of all around them
_BAR_INCHES, _AROUND_INCHES = 0.42, 0.9
#: the floors, and their lines
_FLOORS: Mapping[str, tuple[str, Any]] = {
    "compute_floor_s": ("floor: the model's FLOPs", "-"),
    "links_floor_s": ("floor: bytes sent", ":"),
}
_OTHER = "other"


def draw_layouts(title: str, layouts: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw a bar a layout, the best above, into a file of the type that its name says; returns the path.

    Args:
        layouts: with ``strategy``, ``mesh``, ``backend``, ``step_time_s``, ``step_time_low_s`` and
            ``step_time_high_s`` (or None), ``parts`` (seconds by what they are spent on), ``compute_floor_s``
            and ``links_floor_s`` (or None).

    Raises:
        ValueError: there is no such type of files.
    """
    return save_as(layouts_figure(title, layouts), path)


def layouts_figure(title: str, layouts: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure of :func:`draw_layouts`."""
    parts = [*dict.fromkeys(name for each in layouts for name, s in each["parts"].items() if s > 0)]
    colors = category_colors(parts) | {_OTHER: GREY}
    with house_style():
        figure = new_figure(PAGE_INCHES, _AROUND_INCHES + _BAR_INCHES * len(layouts), title)
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
        names = [f"{each['strategy']}\n{each['mesh']}, {each['backend']}" for each in layouts]
        ax.set_yticks(range(len(layouts)), names)
        ax.set(xlim=(0, None), ylim=(len(layouts) - 0.5, -0.5), xlabel="Seconds of a step")
        ax.grid(visible=False, axis="y")
        legend: list[Any] = [
            Patch(color=colors[name], label=name) for name in [*parts, _OTHER] if name in shown
        ]
        legend += [Line2D([], [], color=INK, linestyle=s, label=label) for label, s in _FLOORS.values()]
        add_legend(figure, legend)
        return figure
