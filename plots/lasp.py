"""Figures of LASP (arXiv 2404.02882) and LASP-2 (arXiv 2502.07563) over the sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import matplotlib as mpl
from matplotlib.colors import to_hex
from pandas import DataFrame

from spbench.plots.axes import LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, Line, PlottedQuantity, line_grid, lines_of, measured
from spbench.plots.sent_elements import sent_elements
from spbench.plots.series import Row, backend, by_model, gpu_counts, gpus, grouped, model, option, strategy
from spbench.plots.style import MARKERS, Look, backend_name

_MEMORY = PlottedQuantity("memory_gb", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30))
#: how a baseline computes linear attention -> its name; the strategies of LASP have a single way
_WAYS = {"left_product": "left product", "chunked": "right product"}
_ONE_WAY = ("lasp", "lasp2")


def _scalability(rows: Sequence[Row], comparison: DataFrame, default_title: str) -> PanelGrid:
    """A column for each model and data-parallel backend, the backends in the order of the rows; a line for
    each number of GPUs, from dark to light."""
    counts = gpu_counts(rows)
    # without the light end of the colour map
    colors = [to_hex(mpl.colormaps["viridis"](0.75 * at / len(counts))) for at in range(len(counts))]
    look = {n: Look(colors[at], MARKERS[at % len(MARKERS)]) for at, n in enumerate(counts)}
    facets = {}
    for name, of_model in by_model(rows).items():
        for of, some in grouped(of_model, backend).items():
            facets[f"{name}, {backend_name(of)}"] = [
                Line(f"{count} GPUs", look[count], tuple(sorted(of_count, key=LENGTHS.at)))
                for count, of_count in sorted(grouped(some, gpus).items())
            ]
    return line_grid(rows, facets, (_MEMORY, TOKENS_PER_SECOND), comparison, default_title)


def _speed(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model, a line for each strategy and way to compute linear attention."""
    facets = {
        name: lines_of(some, LENGTHS, partial(_way, first_cluster=some[0]["cell"]["cluster"]))
        for name, some in by_model(rows).items()
    }
    return line_grid(rows, facets, [TOKENS_PER_SECOND], comparison, "Throughput by sequence length")


def _way(row: Row, first_cluster: str) -> str:
    """How the row's strategy computes linear attention, and its cluster if it is not the first one."""
    way, cluster = str(option(row, "model_options", "linear_attention", "chunked")), row["cell"]["cluster"]
    texts = ["" if strategy(row) in _ONE_WAY else _WAYS.get(way, way)]
    return ", ".join(filter(None, [*texts, cluster if cluster != first_cluster else ""]))


draw_lasp_scalability = Drawing(
    "lasp_scalability", partial(_scalability, default_title="Memory and throughput of LASP")
)
"""Memory and throughput by sequence length and GPUs: LASP (arXiv 2404.02882), scalability figures."""

draw_lasp2_scalability = Drawing(
    "lasp2_scalability", partial(_scalability, default_title="Memory and throughput of LASP-2")
)
"""Memory and throughput by sequence length and GPUs: LASP-2 (arXiv 2502.07563)."""

draw_lasp_speed = Drawing("lasp_speed", _speed)
"""Throughput by sequence length of each method: LASP (arXiv 2404.02882), speed figure."""

draw_lasp_communication = Drawing(
    "lasp_communication",
    partial(sent_elements, along=LENGTHS, facet=lambda row: f"{model(row)}, {gpus(row)} GPUs"),
)
"""What a GPU sends for a layer of linear attention by sequence length: LASP (arXiv 2404.02882), Table 1."""
