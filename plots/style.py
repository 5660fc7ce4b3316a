"""The look that all figures share: colours, markers, sizes, names and the format of numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import matplotlib as mpl
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

#: width of a page's text, and of one of its two columns
PAGE_INCHES, COLUMN_INCHES = 7.2, 3.6
DPI = 150

#: strategies in the order of legends -> place in the palette of ten colours, and marker
_LOOKS = {
    "tensor_parallel": (0, "o"),
    "ring_self_attention": (1, "s"),
    "megatron_sp": (2, "D"),
    "ulysses": (3, "^"),
    "ring_attention": (4, "v"),
    "lasp": (5, "P"),
    "lasp2": (9, "X"),
    "dsp": (6, "*"),
    "single": (7, "h"),
}
MARKERS = "osD^vP*hXp"
_NAMES = {
    "megatron_sp": "Megatron-SP",
    "ulysses": "Ulysses",
    "lasp": "LASP",
    "lasp2": "LASP-2",
    "dsp": "DSP",
}
#: names of strategies where there are several in one name, or many names beside each other
_SHORT_NAMES = {
    "tensor_parallel": "TP",
    "ring_self_attention": "RSA",
    "ring_attention": "Ring",
}
_BACKENDS = {
    "legacy_ddp": "legacy DDP",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp_flat": "FSDP",
}
INK, GREY = "0.15", "0.45"
#: between the names of strategies around each other
PLUS = "+"
TIMES = "\N{MULTIPLICATION SIGN}"

_RC: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are alike everywhere
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "figure.titlesize": 9.5,
    "axes.linewidth": 0.7,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "spbench",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn."""

    color: str
    marker: str


def looks(strategies: Iterable[str]) -> dict[str, Look]:
    """The look of each strategy, in the order of legends.

    A strategy looks the same in every figure, whichever others are in it: one that is not known here takes
    its colour and marker from its name. Strategies around each other, as "megatron_sp+lasp", have the colour
    of the innermost and the marker of the outermost.
    """
    names = set(strategies)
    if composed := {name for name in names if PLUS in name}:
        single = looks(part for name in names for part in name.split(PLUS))
        parts = {name: name.split(PLUS) for name in composed}
        found = {name: single[name] for name in single if name in names}
        return found | {
            name: Look(single[parts[name][-1]].color, single[parts[name][0]].marker)
            for name in sorted(composed)
        }
    palette = [str(color) for color in sns.color_palette("colorblind", 10).as_hex()]
    found = {name: Look(palette[at], marker) for name, (at, marker) in _LOOKS.items() if name in names}
    return found | {name: _look_by_name(name) for name in sorted(names - set(_LOOKS))}


def _look_by_name(name: str) -> Look:
    digest = crc32(name.encode())
    (color,) = sns.husl_palette(1, h=digest / 2**32, l=0.5).as_hex()
    return Look(str(color), MARKERS[digest % len(MARKERS)])


def tint(color: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white; strength 1 is the colour itself."""
    red, green, blue = to_rgb(color)
    return (1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue))


def strategy_name(strategy: str) -> str:
    """The strategy's name as figures show it; of strategies around each other, their :func:`short_name`."""
    return short_name(strategy) if PLUS in strategy else _NAMES.get(strategy, strategy.replace("_", " "))


def short_name(strategy: str) -> str:
    """A short name of a strategy; of strategies around each other these names, with plus signs between."""
    parts = strategy.split(PLUS)
    return f" {PLUS} ".join(_SHORT_NAMES.get(part) or strategy_name(part) for part in parts)


def backend_name(backend: str) -> str:
    """The data-parallel backend's name as figures show it."""
    return _BACKENDS.get(backend, backend)


def number(value: float) -> str:
    """A value with three significant digits; from 1,000 on all digits of the whole part."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shortened(text: str, width: int, lines: int = 1) -> str:
    """The text wrapped to ``width`` characters, cut after ``lines`` lines."""
    words = " ".join(text.split())
    wrapped = textwrap.wrap(words, width, max_lines=lines, placeholder=" …", break_on_hyphens=False)
    return "\n".join(wrapped)


@contextmanager
def house_style() -> Iterator[None]:
    """The settings of matplotlib and seaborn under which figures are drawn and saved."""
    with sns.axes_style("whitegrid"), mpl.rc_context(_RC):
        yield


def new_figure(width_inches: float, height_inches: float, title: str) -> Figure:
    """An empty figure with constrained layout, which needs no display; the title adds to its height."""
    lines = shortened(title, int(13 * width_inches), 3)
    height_inches += 0.25 + 0.17 * (1 + lines.count("\n"))
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    figure.suptitle(lines)
    return figure


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Add one legend for all panels and make the figure higher by it; handles of one label are one entry."""
    entries = {str(handle.get_label()): handle for handle in reversed(handles)}
    ordered = list(reversed(entries.values()))
    if not ordered:
        return
    fitting = int(figure.get_figwidth() / (0.052 * max(map(len, entries)) + 0.6))
    columns = max(1, min(fitting, len(ordered)))
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-len(ordered) // columns) + 0.1)
    figure.legend(handles=ordered, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.8)
