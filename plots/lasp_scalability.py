"""Memory and throughput by sequence length and GPUs: LASP (arXiv 2404.02882), scalability figures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import matplotlib as mpl
from matplotlib.colors import to_hex
from pandas import DataFrame

from spbench.plots.axes import LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, Line, PlottedQuantity, line_grid, measured
from spbench.plots.series import Row, backend, by_model, gpu_counts, gpus, grouped
from spbench.plots.style import MARKERS, Look, backend_name

_QUANTITIES = (
    PlottedQuantity("memory_gb", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    TOKENS_PER_SECOND,
)


def length_scaling(rows: Sequence[Row], comparison: DataFrame, default_title: str) -> PanelGrid:
    """A column for each model and data-parallel backend, the backends in the order of the rows; a line for
    each number of GPUs.

    Args:
        rows: of several lengths and numbers of GPUs.
        default_title: the title if the rows name no scenario.
    """
    look = _looks(gpu_counts(rows))
    facets = {}
    for model, of_model in by_model(rows).items():
        for name, some in grouped(of_model, backend).items():
            facets[f"{model}, {backend_name(name)}"] = [
                Line(f"{count} GPUs", look[count], tuple(sorted(of_count, key=LENGTHS.at)))
                for count, of_count in sorted(grouped(some, gpus).items())
            ]
    return line_grid(rows, facets, _QUANTITIES, comparison, default_title)


def _looks(counts: Sequence[int]) -> dict[int, Look]:
    """A look for each count, from dark to light; the colour map's light end is left out."""
    colors = [to_hex(mpl.colormaps["viridis"](0.75 * at / len(counts))) for at in range(len(counts))]
    return {n: Look(colors[at], MARKERS[at % len(MARKERS)]) for at, n in enumerate(counts)}


draw = Drawing(__name__, partial(length_scaling, default_title="Memory and throughput of LASP"))
