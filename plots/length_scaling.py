"""Memory and throughput over the sequence length, a line for each number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import seaborn as sns
from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.line_panels import Line, Quantity, line_panels
from spbench.plots.lines import measured
from spbench.plots.series import Row, by_model, gpu_counts, gpus
from spbench.plots.style import Look, backend_name

_QUANTITIES = (
    Quantity("memory_gb", "Peak memory (GiB)", measured("peak_memory_bytes", 2**30)),
    Quantity("throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True),
)
_MARKERS = "osD^vP*X"


def length_scaling_figure(rows: Sequence[Row], comparison: DataFrame, otherwise: str) -> Figure:
    """A column for each model and data-parallel backend, the backends in the order of the rows.

    Args:
        otherwise: a title, where the rows name no scenario.
    """
    look = _looks(gpu_counts(rows))
    panels = {}
    for model, some in by_model(rows).items():
        for backend in dict.fromkeys(_backend(row) for row in some):
            mine = [row for row in some if _backend(row) == backend]
            panels[f"{model}, {backend_name(backend)}"] = [
                Line(f"{count} GPUs", look[count], _by_length(mine, count)) for count in gpu_counts(mine)
            ]
    return line_panels(rows, panels, _QUANTITIES, comparison, otherwise)


def _looks(counts: Sequence[int]) -> dict[int, Look]:
    """Counts are ordered and so are their colours, which differ in lightness too, but for the lightest."""
    colors = sns.color_palette("viridis", len(counts) + 1).as_hex() if counts else []
    return {n: Look(str(colors[i]), _MARKERS[i % len(_MARKERS)]) for i, n in enumerate(counts)}


def _backend(row: Row) -> str:
    return str(row["cell"]["training"]["backend"])


def _by_length(rows: Sequence[Row], count: int) -> tuple[Row, ...]:
    return tuple(sorted((r for r in rows if gpus(r) == count), key=lambda row: row["cell"]["seq_len"]))
