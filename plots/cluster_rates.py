"""What a cluster reaches by size, of products, attention by kernel, and links, with the points of sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spbench.plots.axes import set_ticks
from spbench.plots.grid import Drawn, Panel, PanelGrid, save_widths
from spbench.plots.machine_rates import bytes_text
from spbench.plots.series import grouped
from spbench.plots.style import category_colors

#: of a line: its panel, what is along that ("size", "length" or "message"), its name, sizes, rates at these
#: in FLOPs or bytes a second, and by size what was measured
Curve = Mapping[str, Any]

_ALONG = {
    "size": ("n of [n, n] x [n, n]", "TFLOP/s", 1e12),
    "length": ("tokens", "TFLOP/s", 1e12),
    "message": ("message", "bus bandwidth, GB/s", 1e9),
}
#: of each eight lines of a panel, which have one colour each
_DASHES = ("-", "--", ":")


def draw_cluster_rates(curves: Sequence[Curve], title: str, output: Path) -> list[Path]:
    """Write the files of :func:`cluster_rates` beside ``output``, with its name; returns their paths."""
    return save_widths(cluster_rates(curves, title), output.parent, output.stem)


def cluster_rates(curves: Sequence[Curve], title: str) -> PanelGrid:
    """A panel for each of the curves' panels: lines as they are computed with, and hollow markers, those of
    the source, where it has several."""
    panels = []
    for name, lines in grouped(curves, lambda curve: str(curve["panel"])).items():
        x_label, y_label, unit = _ALONG[lines[0]["along"]]
        draw = partial(_draw, lines=lines, unit=unit)
        panels.append(Panel(draw, name.replace("_", " "), x_label, y_label, axis="linear", inches=2.2))
    notes = [
        "Lines: what a simulation computes with. Markers: points of the sources, where these have several."
    ]
    return PanelGrid(title, notes).add([[panel] for panel in panels], abreast=2)


def _draw(ax: Axes, lines: Sequence[Curve], unit: float) -> Drawn:
    sizes, values = lines[0]["sizes"], []
    text = bytes_text if lines[0]["along"] == "message" else str
    # those that reach the same are one line
    alike = grouped(lines, lambda line: (tuple(line["rates"]), tuple(line["measured"].items())))
    names = [", ".join(str(line["name"]).replace("_", "-") for line in some) for some in alike.values()]
    colors = category_colors(names)
    ax.set_xscale("log", base=2)
    for place, (name, (rates, measured)) in enumerate(zip(names, alike, strict=True)):
        gid = f"{lines[0]['panel']} {name}"
        style: dict[str, Any] = {"color": colors[name], "linestyle": _DASHES[place // 8 % len(_DASHES)]}
        ax.plot(sizes, [rate / unit for rate in rates], label=name, gid=gid, **style)
        points = {size: rate / unit for size, rate in measured}
        style |= {"linestyle": "none", "marker": "o", "markersize": 3.6, "markerfacecolor": "white"}
        ax.plot([*points], [*points.values()], gid=f"measured {gid}", **style)
        values += [*(rate / unit for rate in rates), *points.values()]
    shown = sizes[:: -(-len(sizes) // 5)]
    set_ticks(ax.xaxis, shown, [text(size) for size in shown])
    ax.minorticks_off()
    ax.legend()
    return Drawn(values=values)
