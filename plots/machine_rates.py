"""Measured rates of a machine: matrix products and attention by size, memory, and collectives' bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from spbench.plots.axes import set_ticks
from spbench.plots.drawing import save_widths
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.series import grouped
from spbench.plots.style import MARKERS, category_colors

#: a measured rate: its operation, size, extent, precision, ranks, rates of the median sample, and the seconds
#: of the median, least and longest sample
Rate = Mapping[str, Any]

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
    """Write the files of :func:`machine_rates` beside ``output``, with its name; returns their paths."""
    return save_widths(machine_rates(rates, title), output.parent, output.stem)


def machine_rates(rates: Sequence[Rate], title: str) -> PanelGrid:
    """A panel each for matrix products, attention, memory and collectives, as far as there are rates.

    Lines are medians; the tint round a line goes from the longest sample to the least one.
    """
    panels = [panel for panel in _panels(rates) if panel.rates]
    return PanelGrid(title).add(
        [
            [Panel(partial(_draw, panel=of), of.title, of.x_label, of.y_label, axis="linear", inches=2.0)]
            for of in panels
        ],
        abreast=2,
    )


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


def _draw(ax: Axes, panel: _Panel) -> Drawn:
    lines = grouped(panel.rates, panel.line)
    extents = sorted({rate["extent"] for rate in panel.rates})
    ax.set_xscale("log", base=2)
    highest = []
    for place, (name, color) in enumerate(category_colors(lines).items()):
        some = sorted(lines[name], key=lambda rate: rate["extent"])
        at = [rate["extent"] for rate in some]
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
            markersize=3.6,
            label=name,
            gid=f"{panel.title} {name}".strip(),
        )
    shown = extents[:: -(-len(extents) // 6)]
    set_ticks(ax.xaxis, shown, [_bytes(extent) if panel.is_bytes else str(extent) for extent in shown])
    ax.minorticks_off()
    if len(lines) > 1 or next(iter(lines)):
        # in the panel: other panels have other lines of these colours
        ax.legend()
    return Drawn(values=highest)


def _bytes(extent: int) -> str:
    power = min(3, (extent.bit_length() - 1) // 10)
    return f"{extent / 2 ** (10 * power):.4g} {_POWERS[power]}B"
