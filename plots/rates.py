"""Rates by size: rates measured on a machine, and rates that simulate a cluster."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spbench.plots.axes import set_ticks
from spbench.plots.grid import Drawn, Panel, PanelGrid, save_widths
from spbench.plots.series import grouped
from spbench.plots.style import MARKERS, category_colors

# -- measured on a machine -------------------------------------------------------------------------------

#: a measured rate: operation, size, extent, precision, ranks, the rates of the median sample, and the seconds
#: of the median, shortest and longest sample
Rate = Mapping[str, Any]

_POWERS = {0: "", 1: "Ki", 2: "Mi", 3: "Gi"}


def draw_machine_rates(rates: Sequence[Rate], title: str, output: Path) -> list[Path]:
    """Write :func:`machine_rates` to files with the folder and stem of ``output``; returns their paths."""
    return save_widths(machine_rates(rates, title), output.parent, output.stem)


def machine_rates(rates: Sequence[Rate], title: str) -> PanelGrid:
    """A panel for each of matmuls, attention, sums of tensors and collectives, if there are rates. Lines are
    medians; the tint around a line spans the longest to the shortest sample."""
    matmuls = [rate for rate in rates if rate["operation"] == "matmul"]
    attention = [rate for rate in rates if str(rate["operation"]).startswith("attention")]
    sums = [rate for rate in rates if rate["operation"] == "sum"]
    collectives = [rate for rate in rates if rate["bus_bytes_per_s"] is not None]
    tera = max((rate["flops_per_s"] for rate in [*matmuls, *attention]), default=0.0) >= 1e12
    unit, flops = (1e12, "TFLOP/s") if tera else (1e9, "GFLOP/s")
    on = f"Collectives on {max((rate['ranks'] for rate in rates), default=1)} ranks"
    panels = [
        _panel("Matmuls", "s", flops, matmuls, _matmul_line, "flops_per_s", unit),
        _panel("Attention", "sequence length", flops, attention, _attention_line, "flops_per_s", unit),
        _panel("Sum of two tensors", "size of each", "GB/s", sums, lambda rate: "", "bytes_per_s"),
        _panel(on, "size S", "bus bandwidth, GB/s", collectives, _operation, "bus_bytes_per_s"),
    ]
    return PanelGrid(title).add([[panel] for panel in panels if panel], abreast=2)


def _panel(
    title: str,
    x_label: str,
    y_label: str,
    rates: Sequence[Rate],
    line: Callable[[Rate], str],
    field: str,
    unit: float = 1e9,
) -> Panel | None:
    """A panel of one field of rates, divided by ``unit``; None without rates.

    Args:
        line: a function from a rate to the name of its line.
    """
    draw = partial(_draw_rates, title=title, lines=grouped(rates, line), field=field, unit=unit)
    return Panel(draw, title, x_label, y_label, axis="linear", inches=2.0) if rates else None


def _operation(rate: Rate) -> str:
    return str(rate["operation"])


def _matmul_line(rate: Rate) -> str:
    square = len(set(str(rate["size"]).replace("] x [", ", ").strip("[]").split(", "))) == 1
    return f"{rate['precision']}, {'[s, s] x [s, s]' if square else '[4s, s] x [s, 4s]'}"


def _attention_line(rate: Rate) -> str:
    return f"{rate['precision']}, {_operation(rate).removeprefix('attention ')}"


def _draw_rates(ax: Axes, title: str, lines: Mapping[str, Sequence[Rate]], field: str, unit: float) -> Drawn:
    extents = sorted({rate["extent"] for some in lines.values() for rate in some})
    text = str if field == "flops_per_s" else bytes_text
    ax.set_xscale("log", base=2)
    highest = []
    for place, (name, color) in enumerate(category_colors(lines).items()):
        some = sorted(lines[name], key=lambda rate: rate["extent"])
        at = [rate["extent"] for rate in some]
        slowest, quickest = (
            [rate[field] / unit * rate["seconds"] / rate[bound] for rate in some]
            for bound in ("most_s", "least_s")
        )
        highest.append(max(quickest))
        ax.fill_between(at, slowest, quickest, color=color, alpha=0.15, linewidth=0)
        ax.plot(
            at,
            [rate[field] / unit for rate in some],
            color=color,
            marker=MARKERS[place % len(MARKERS)],
            markersize=3.6,
            label=name,
            gid=f"{title} {name}".strip(),
        )
    shown = extents[:: -(-len(extents) // 6)]
    set_ticks(ax.xaxis, shown, [text(extent) for extent in shown])
    ax.minorticks_off()
    if len(lines) > 1 or next(iter(lines)):
        # the legend is in the panel, because other panels have other lines of these colours
        ax.legend()
    return Drawn(values=highest)


def bytes_text(extent: int) -> str:
    """A number of bytes as text: "64 KiB"."""
    power = min(3, (extent.bit_length() - 1) // 10)
    return f"{extent / 2 ** (10 * power):.4g} {_POWERS[power]}B"


# -- of a cluster ----------------------------------------------------------------------------------------

#: a line: ``panel``, the kind of its x axis (``along``: "size", "length" or "message"), ``name``, ``sizes``,
#: ``rates`` at these sizes in FLOPs or bytes a second, and ``measured`` rates by size
Curve = Mapping[str, Any]

_ALONG = {
    "size": ("n of [n, n] x [n, n]", "TFLOP/s", 1e12),
    "length": ("tokens", "TFLOP/s", 1e12),
    "message": ("message", "bus bandwidth, GB/s", 1e9),
}
#: the line styles of the first, second and third eight lines of a panel, because colours repeat after eight
_DASHES = ("-", "--", ":")


def draw_cluster_rates(curves: Sequence[Curve], title: str, output: Path) -> list[Path]:
    """Write :func:`cluster_rates` to files with the folder and stem of ``output``; returns their paths."""
    return save_widths(cluster_rates(curves, title), output.parent, output.stem)


def cluster_rates(curves: Sequence[Curve], title: str) -> PanelGrid:
    """A panel for each of the curves' panels: lines for the simulated rates, and hollow markers for the
    measured points of the source, if it has several."""
    panels = []
    for name, lines in grouped(curves, lambda curve: str(curve["panel"])).items():
        x_label, y_label, unit = _ALONG[lines[0]["along"]]
        draw = partial(_draw_curves, lines=lines, unit=unit)
        panels.append(Panel(draw, name.replace("_", " "), x_label, y_label, axis="linear", inches=2.2))
    notes = [
        "Lines: what a simulation computes with. Markers: points of the sources, where these have several."
    ]
    return PanelGrid(title, notes).add([[panel] for panel in panels], abreast=2)


def _draw_curves(ax: Axes, lines: Sequence[Curve], unit: float) -> Drawn:
    sizes, values = lines[0]["sizes"], []
    text = bytes_text if lines[0]["along"] == "message" else str
    # curves with equal rates are drawn as one line
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
