"""Measured rates of a machine: matrix products and attention by size, memory, and collectives' bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spbench.plots.axes import set_ticks
from spbench.plots.grid import Drawn, Panel, PanelGrid, save_widths
from spbench.plots.series import grouped
from spbench.plots.style import MARKERS, category_colors

#: a measured rate: its operation, size, extent, precision, ranks, rates of the median sample, and the seconds
#: of the median, least and longest sample
Rate = Mapping[str, Any]

_POWERS = {0: "", 1: "Ki", 2: "Mi", 3: "Gi"}


def draw_machine_rates(rates: Sequence[Rate], title: str, output: Path) -> list[Path]:
    """Write the files of :func:`machine_rates` beside ``output``, with its name; returns their paths."""
    return save_widths(machine_rates(rates, title), output.parent, output.stem)


def machine_rates(rates: Sequence[Rate], title: str) -> PanelGrid:
    """A panel each for matrix products, attention, memory and collectives, as far as there are rates.

    Lines are medians; the tint round a line goes from the longest sample to the least one.
    """
    products = [rate for rate in rates if rate["operation"] == "matrix product"]
    attention = [rate for rate in rates if str(rate["operation"]).startswith("attention")]
    sums = [rate for rate in rates if rate["operation"] == "sum"]
    collectives = [rate for rate in rates if rate["bus_bytes_per_s"] is not None]
    tera = max((rate["flops_per_s"] for rate in [*products, *attention]), default=0.0) >= 1e12
    unit, flops = (1e12, "TFLOP/s") if tera else (1e9, "GFLOP/s")
    on = f"Collectives on {max((rate['ranks'] for rate in rates), default=1)} ranks"
    panels = [
        _panel("Matrix products", "s", flops, products, _product_line, "flops_per_s", unit),
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
    """A panel of the field of rates in units of ``unit``; None without rates.

    Args:
        line: the name of the line that a rate is on.
    """
    draw = partial(_draw, title=title, lines=grouped(rates, line), field=field, unit=unit)
    return Panel(draw, title, x_label, y_label, axis="linear", inches=2.0) if rates else None


def _operation(rate: Rate) -> str:
    return str(rate["operation"])


def _product_line(rate: Rate) -> str:
    square = len(set(str(rate["size"]).replace("] x [", ", ").strip("[]").split(", "))) == 1
    return f"{rate['precision']}, {'[s, s] x [s, s]' if square else '[4s, s] x [s, 4s]'}"


def _attention_line(rate: Rate) -> str:
    return f"{rate['precision']}, {_operation(rate).removeprefix('attention ')}"


def _draw(ax: Axes, title: str, lines: Mapping[str, Sequence[Rate]], field: str, unit: float) -> Drawn:
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
        # in the panel: other panels have other lines of these colours
        ax.legend()
    return Drawn(values=highest)


def bytes_text(extent: int) -> str:
    """A number of bytes, as "64 KiB"."""
    power = min(3, (extent.bit_length() - 1) // 10)
    return f"{extent / 2 ** (10 * power):.4g} {_POWERS[power]}B"
