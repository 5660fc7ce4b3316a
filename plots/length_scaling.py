"""Memory and throughput over the sequence length, a line for each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import seaborn as sns
from matplotlib.figure import Figure
from pandas import DataFrame
from spbench.plots.along import LENGTHS
from spbench.plots.line_panels import line_panels

from spbench.plots.lines import Line, PlottedQuantity, measured
from spbench.plots.series import Row, backend, by_model, gpu_counts, gpus, grouped
from spbench.plots.style import MARKERS, Look, backend_name

_QUANTITIES = (
    PlottedQuantity("memory_gb", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    PlottedQuantity(
        "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
    ),
)


def length_scaling_figure(rows: Sequence[Row], comparison: DataFrame, default_title: str) -> Figure:
    """A column for each model and data-parallel backend, the backends in the order of the rows.

    Args:
        rows: of several lengths and numbers of GPUs.
        default_title: the title if the rows name no scenario.
    """
    look = _looks(gpu_counts(rows))
    panels = {}
    for model, of_model in by_model(rows).items():
        for name, some in grouped(of_model, backend).items():
            panels[f"{model}, {backend_name(name)}"] = [
                Line(f"{count} GPUs", look[count], tuple(sorted(of_count, key=LENGTHS.at)))
                for count, of_count in sorted(grouped(some, gpus).items())
            ]
    return line_panels(rows, panels, _QUANTITIES, comparison, default_title)


def _looks(counts: Sequence[int]) -> dict[int, Look]:
    """A look for each count, from dark to light; the palette's lightest colour is left out."""
    colors = sns.color_palette("viridis", len(counts) + 1).as_hex() if counts else []
    return {n: Look(str(colors[i]), MARKERS[i % len(MARKERS)]) for i, n in enumerate(counts)}
