"""The figure of `spbench fit`: a rank's memory over set-up and steps, stacked by kind, the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from spbench.plots.paper import PAGE_INCHES, add_legend, house_style, new_figure, save_as
from spbench.plots.style import GREY, INK, category_colors

_GIB = 2**30
#: from the bottom to the top: what lives longest, then what comes and goes
_ORDER = (
    *("parameters", "optimizer_state", "gradients", "inputs", "workspaces"),
    *("activations", "communication_buffers", "temporaries"),
)
#: of the x axis, below which a phase has no name of its own
_NARROW = 0.06


def draw_memory(anatomy: Mapping[str, Any], usable_bytes: int, title: str, path: Path) -> Path:
    """Draw a rank's memory into a file of the type that its name says; returns the path.

    Args:
        anatomy: as :class:`Anatomy`, plain data.
        usable_bytes: of the card, drawn as a line.

    Raises:
        ValueError: there is no such type of files.
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
    """The stacked kinds; returns the patches of the legend."""
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
    """Lines where phases begin, and the names of those that are wide enough, above the axes."""
    starts = [first for _, first in phases] + [events]
    for (name, first), end in zip(phases, starts[1:], strict=True):
        ax.axvline(first, color=GREY, linewidth=0.4, alpha=0.6)
        if end - first > _NARROW * events:
            at = ((first + end) / 2, 1.01)
            ax.annotate(name, at, xycoords=("data", "axes fraction"), ha="center", fontsize=6.5)
