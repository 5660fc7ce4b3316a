"""The look that all figures share: colours, markers, sizes, units, and how a figure is saved."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

#: width of a page's text, and of one of its two columns
PAGE_INCHES, COLUMN_INCHES = 7.2, 3.6
DPI = 150

#: strategies in the order in which they take colours and stand in legends; others follow by name
_ORDER = (
    "tensor_parallel",
    "ring_self_attention",
    "megatron_sp",
    "ulysses",
    "ring_attention",
    "lasp",
    "dsp",
    "single",
)
_MARKERS = "osD^vP*hXp"
_NAMES = {
    "megatron_sp": "Megatron-SP",
    "ulysses": "Ulysses",
    "lasp": "LASP",
    "lasp2": "LASP-2",
    "dsp": "DSP",
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
    """The look of each strategy, in the order of legends. Known ones look the same in every figure."""
    names = set(strategies)
    known, others = [name for name in _ORDER if name in names], sorted(names - set(_ORDER))
    colors = [str(color) for color in sns.color_palette("colorblind", 8).as_hex()]
    every = list(islice(zip(cycle(colors), cycle(_MARKERS), strict=False), len(_ORDER) + len(others)))
    taken = dict(zip(_ORDER, every, strict=False)) | dict(zip(others, every[len(_ORDER) :], strict=True))
    return {name: Look(*taken[name]) for name in [*known, *others]}


def tint(color: str, strength: float) -> tuple[float, float, float]:
    """The colour mixed with white; strength 1 is the colour itself."""
    red, green, blue = to_rgb(color)
    return (1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue))


def strategy_name(strategy: str) -> str:
    """The strategy's name for people."""
    return _NAMES.get(strategy, strategy.replace("_", " "))


def backend_name(backend: str) -> str:
    """The data-parallel backend's name for people."""
    return _BACKENDS.get(backend, backend)


def number(value: float) -> str:
    """A value with three digits, or whole with separators from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def shortened(text: str, width: int, lines: int = 1) -> str:
    """The text on at most so many lines of so many characters."""
    words = " ".join(text.split())
    wrapped = textwrap.wrap(words, width, max_lines=lines, placeholder=" …", break_on_hyphens=False)
    return "\n".join(wrapped)


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save figures within this."""
    with sns.axes_style("whitegrid"), mpl.rc_context(_RC):
        yield


def new_figure(width_inches: float, height_inches: float, title: str) -> Figure:
    """An empty figure that arranges itself and needs no display; the title's height is added to it."""
    lines = shortened(title, int(13 * width_inches), 3)
    height_inches += 0.25 + 0.17 * (1 + lines.count("\n"))
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    figure.suptitle(lines)
    return figure


def add_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """One legend for all panels, in room made under them; handles of one label are one entry."""
    entries = {str(handle.get_label()): handle for handle in reversed(handles)}
    ordered = list(reversed(entries.values()))
    if not ordered:
        return
    fitting = int(figure.get_figwidth() / (0.052 * max(map(len, entries)) + 0.6))
    columns = max(1, min(fitting, len(ordered)))
    figure.set_figheight(figure.get_figheight() + 0.16 * -(-len(ordered) // columns) + 0.1)
    figure.legend(handles=ordered, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.8)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, the same bytes for the same figure; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    figure.savefig(paths[0], dpi=DPI, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
