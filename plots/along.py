"""What the x axis of a panel of lines is: the sequence length, or the number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from spbench.plots.panel import gpu_axis
from spbench.plots.series import Row, gpus

_LABELS_A_PANEL = 8


@dataclass(frozen=True)
class Along:
    """An x axis.

    Attributes:
        at: the place of a row.
        draw_axis: scale, limits and ticks for these places, which ascend.
        text: these places, for people.
        oom_persists: whether a run out of memory means that none further along fits.
    """

    label: str
    at: Callable[[Row], int]
    draw_axis: Callable[[Axes, Sequence[int]], None]
    text: Callable[[Sequence[int]], str]
    oom_persists: bool


def length_text(tokens: int) -> str:
    """A length as papers have it: 2K for 2048."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def _length_axis(ax: Axes, lengths: Sequence[int]) -> None:
    """A log2 axis with a tick for each length, as many of them labelled as there is room for."""
    every = -(-len(lengths) // _LABELS_A_PANEL)
    labels = [length_text(n) if i % every == 0 else "" for i, n in enumerate(lengths)]
    ax.set_xscale("log", base=2)
    ax.set_xlim(lengths[0] / 2**0.6, lengths[-1] * 2**0.6)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(length=2.5, width=0.7, bottom=True)


LENGTHS = Along(
    "Sequence length (tokens)",
    lambda row: int(row["cell"]["seq_len"]),
    _length_axis,
    lambda lengths: ", ".join(map(length_text, lengths)),
    oom_persists=True,
)
GPUS = Along(
    "Number of GPUs",
    gpus,
    gpu_axis,
    lambda counts: ", ".join(map(str, counts)) + " GPUs",
    oom_persists=False,
)
