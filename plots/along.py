"""The x axes of line panels: the sequence length and the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from spbench.plots.series import Row, gpus

_LABELS_A_PANEL = 8
_LENGTH_MARGIN, _GPU_MARGIN = 0.6, 0.35  # in octaves, at both ends


@dataclass(frozen=True)
class Along:
    """An x axis.

    Attributes:
        at: the place of a row.
        draw_axis: sets scale, limits and ticks for places in ascending order.
        text: places as text for notes.
        oom_persists: whether out of memory at one place means out of memory at all later ones.
    """

    label: str
    at: Callable[[Row], int]
    draw_axis: Callable[[Axes, Sequence[int]], None]
    text: Callable[[Sequence[int]], str]
    oom_persists: bool


def length_text(tokens: int) -> str:
    """A sequence length as papers write it: 2K for 2048."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def _octaves(ax: Axes, places: Sequence[int], labels: Sequence[str], margin: float) -> None:
    """A log2 axis with a tick at each place."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(places[0] / 2**margin, places[-1] * 2**margin)
    ax.xaxis.set_major_locator(FixedLocator(places))
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(length=2.5, width=0.7, bottom=True)


def _length_axis(ax: Axes, lengths: Sequence[int]) -> None:
    every = -(-len(lengths) // _LABELS_A_PANEL)
    labels = [length_text(n) if i % every == 0 else "" for i, n in enumerate(lengths)]
    _octaves(ax, lengths, labels, _LENGTH_MARGIN)


def _gpu_axis(ax: Axes, counts: Sequence[int]) -> None:
    """Labels as many counts as there is room for."""
    octaves = math.log2(counts[-1] / counts[0]) + 2 * _GPU_MARGIN
    labelled: list[int] = []
    # first the ends, then powers of two, then the others
    for count in sorted(counts, key=lambda n: (n not in (counts[0], counts[-1]), n & (n - 1) != 0, n)):
        room = (0.02 + 0.03 * len(str(count))) * octaves
        if all(abs(math.log2(count / other)) > room for other in labelled):
            labelled.append(count)
    _octaves(ax, counts, [str(n) if n in labelled else "" for n in counts], _GPU_MARGIN)


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
    _gpu_axis,
    lambda counts: ", ".join(map(str, counts)) + " GPUs",
    oom_persists=False,
)
