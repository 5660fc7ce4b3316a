"""Memory and throughput of weak scaling, published and ours: RSA (arXiv 2105.13120), Table 4."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from spbench.plots.axes import GPUS
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_by_setting, measured
from spbench.plots.series import Row, gpus, grouped, shared

_GROWN = {"batch": "batch", "seq_len": "sequence length"}
_QUANTITIES = (
    PlottedQuantity("memory_mb", "Peak memory (MiB)", measured("peak_memory_bytes", 2**20)),
    PlottedQuantity("throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s")),
)


def weak_scalings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each weak scaling, by its title, those of a growing batch first.

    The rows of one weak scaling have the same number of tokens a GPU.
    """
    found = grouped(rows, lambda row: row["cell"]["batch"] * row["cell"]["seq_len"] / gpus(row))
    scalings = sorted(found.values(), key=lambda some: shared(some, "seq_len") is None)
    return {_scaling_title(some): some for some in scalings}


def _scaling_title(rows: Sequence[Row]) -> str:
    texts = []
    for field, name in _GROWN.items():
        values = sorted({row["cell"][field] for row in rows})
        texts.append(f"{name} {values[0]}" + (f" to {values[-1]}" if len(values) > 1 else ""))
    return ", ".join(texts)


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each weak scaling, a row for each quantity."""
    facets = {
        name: lines_by_setting(some, ignored=tuple(_GROWN)) for name, some in weak_scalings(rows).items()
    }
    return line_grid(rows, facets, _QUANTITIES, comparison, "Weak scaling with pipeline stages", GPUS)


draw = Drawing(__name__, _grid)
