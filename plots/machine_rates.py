"""Measured rates of a machine: matrix products and attention by size, memory, and collectives' bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spbench.plots.page import Page
from spbench.plots.panel import value_axis
from spbench.plots.series import grouped
from spbench.plots.style import DPI, MARKERS, house_style

#: a measured rate: its operation, size, extent, precision, ranks, rates of the median sample, and the seconds
#: of the median, least and longest sample
Rate = Mapping[str, Any]

_PANEL_INCHES = 2.5
_POWERS = {0: "", 1: "Ki", 2: "Mi", 3: "Gi"}


@dataclass(frozen=True)
class _Panel:
    """Rates that are drawn together.

    Attributes:
        field: of a rate, on the y axis, in units of ``unit``.
        line: the name of the line that a rate is on.
        is_bytes: whether the x axis is of bytes.
    """

    title: str
    x_label: str
    y_label: str
    field: str
    unit: float
    rates: Sequence[Rate]
    line: Callable[[Rate], str]
    is_bytes: bool = False


def draw_machine_rates(rates: Sequence[Rate], title: str, output: Path) -> list[Path]:
    """Write ``output`` with the suffixes .png and .svg; returns their paths."""
    png, svg = output.with_suffix(".png"), output.with_suffix(".svg")
    with house_style():
        figure = machine_rates(rates, title)
        figure.savefig(png, dpi=DPI, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def machine_rates(rates: Sequence[Rate], title: str) -> Figure:
    """A panel each for matrix products, attention, memory and collectives, as far as there are rates.

    Lines are medians; the tint round a line goes from the longest sample to the least one.
    """
    panels = [panel for panel in _panels(rates) if panel.rates]
    rows = -(-len(panels) // 2)
    page = Page(title, [_PANEL_INCHES] * rows, columns=min(2, len(panels)))
    for place, panel in enumerate(panels):
        _draw(page.panel(place // 2, place % 2), panel)
    return page.finish([])


def _panels(rates: Sequence[Rate]) -> list[_Panel]:
    products = [rate for rate in rates if rate["operation"] == "matrix product"]
    attention = [rate for rate in rates if str(rate["operation"]).startswith("attention")]
    sums = [rate for rate in rates if rate["operation"] == "sum"]
    collectives = [rate for rate in rates if rate["bus_bytes_per_s"] is not None]
    unit, name = _unit([rate["flops_per_s"] for rate in [*products, *attention]], "FLOP/s")
    ranks = max((rate["ranks"] for rate in rates), default=1)
    return [
        _Panel("Matrix products", "s", name, "flops_per_s", unit, products, _product_line),
        _Panel("Attention", "sequence length", name, "flops_per_s", unit, attention, _attention_line),
        _Panel(
            *("Sum of two tensors", "size of each", "GB/s", "bytes_per_s", 1e9, sums),
            lambda rate: "",
            is_bytes=True,
        ),
        _Panel(
            *(f"Collectives on {ranks} ranks", "size S", "bus bandwidth, GB/s", "bus_bytes_per_s", 1e9),
            collectives,
            lambda rate: str(rate["operation"]),
            is_bytes=True,
        ),
    ]


def _unit(values: Sequence[float], name: str) -> tuple[float, str]:
    tera = max(values, default=0.0) >= 1e12
    return (1e12, f"T{name}") if tera else (1e9, f"G{name}")


def _product_line(rate: Rate) -> str:
    square = len(set(str(rate["size"]).replace("] x [", ", ").strip("[]").split(", "))) == 1
    return f"{rate['precision']}, {'[s, s] x [s, s]' if square else '[4s, s] x [s, 4s]'}"


def _attention_line(rate: Rate) -> str:
    return f"{rate['precision']}, {str(rate['operation']).removeprefix('attention ')}"


def _draw(ax: Axes, panel: _Panel) -> None:
    lines = grouped(panel.rates, panel.line)
    palette = sns.color_palette("colorblind", 10).as_hex()
    extents = sorted({rate["extent"] for rate in panel.rates})
    ax.set_xscale("log", base=2)
    highest = []
    for place, (name, some) in enumerate(lines.items()):
        some = sorted(some, key=lambda rate: rate["extent"])
        at = [rate["extent"] for rate in some]
        color = str(palette[place % len(palette)])
        slowest, quickest = (
            [rate[panel.field] / panel.unit * rate["seconds"] / rate[bound] for rate in some]
            for bound in ("most_s", "least_s")
        )
        highest.append(max(quickest))
        ax.fill_between(at, slowest, quickest, color=color, alpha=0.15, linewidth=0)
        ax.plot(
            at,
            [rate[panel.field] / panel.unit for rate in some],
            color=color,
            marker=MARKERS[place % len(MARKERS)],
            markersize=3.2,
            label=name,
            gid=f"{panel.title} {name}".strip(),
        )
    shown = extents[:: -(-len(extents) // 6)]
    ax.set_xticks(shown, [_bytes(extent) if panel.is_bytes else str(extent) for extent in shown])
    ax.minorticks_off()
    value_axis(ax, max(highest), marks=False)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    if len(lines) > 1 or next(iter(lines)):
        ax.legend(fontsize=6, frameon=False)


def _bytes(extent: int) -> str:
    power = min(3, (extent.bit_length() - 1) // 10)
    return f"{extent / 2 ** (10 * power):.4g} {_POWERS[power]}B"
