"""Figures of RSA (arXiv 2105.13120) over the number of GPUs: throughput, pipeline stages and weak scaling."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pandas import DataFrame

from spbench.plots.axes import GPUS, Along
from spbench.plots.grid import Drawing, PanelGrid
from spbench.plots.lines import PlottedQuantity, line_grid, lines_by_setting, measured
from spbench.plots.series import Row, by_model, gpus, grouped, shared

_BATCH = PlottedQuantity("batch", "Largest batch (sequences)", measured("answer"))
_THROUGHPUT = PlottedQuantity("throughput", "Tokens per second", measured("tokens_per_s"))
_OF_TABLE_4 = (
    PlottedQuantity("memory_mb", "Peak memory (MiB)", measured("peak_memory_bytes", 2**20)),
    replace(_THROUGHPUT, column="throughput_tokens_per_s"),
)
_GROWN = {"batch": "batch", "seq_len": "sequence length"}


def _scaling(
    rows: Sequence[Row],
    comparison: DataFrame,
    quantities: Sequence[PlottedQuantity],
    default_title: str,
    along: Along = GPUS,
) -> PanelGrid:
    """A column for each model, a row for each quantity, a line for each strategy and setting."""
    facets = {}
    for name, some in by_model(rows).items():
        length = shared(some, "seq_len")
        facets[name + (f", sequence length {length}" if length else "")] = lines_by_setting(some)
    return line_grid(rows, facets, quantities, comparison, default_title, along)


def _weak_scaling(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A column for each number of tokens a GPU, scalings of the batch first; a row for each quantity."""
    by_load = grouped(rows, lambda row: row["cell"]["batch"] * row["cell"]["seq_len"] / gpus(row))
    scalings = sorted(by_load.values(), key=lambda some: shared(some, "seq_len") is None)
    facets = {_scaling_title(some): lines_by_setting(some, ignored=tuple(_GROWN)) for some in scalings}
    return line_grid(rows, facets, _OF_TABLE_4, comparison, "Weak scaling with pipeline stages", GPUS)


def _scaling_title(rows: Sequence[Row]) -> str:
    texts = []
    for field, name in _GROWN.items():
        values = sorted({row["cell"][field] for row in rows})
        texts.append(f"{name} {values[0]}" + (f" to {values[-1]}" if len(values) > 1 else ""))
    return ", ".join(texts)


draw_rsa_throughput = Drawing(
    "rsa_throughput",
    partial(_scaling, quantities=[_THROUGHPUT], default_title="Throughput at the largest batch"),
)
"""Throughput at the largest batch by number of GPUs: RSA (arXiv 2105.13120), Figures 3b and 7b."""

draw_rsa_pipeline = Drawing(
    "rsa_pipeline",
    partial(
        _scaling,
        quantities=[_BATCH, _THROUGHPUT],
        default_title="Largest batch by pipeline stages",
        along=replace(GPUS, label="Number of GPUs, 4 a stage"),
    ),
)
"""The largest batch and its throughput by pipeline stages: RSA (arXiv 2105.13120), Figures 4 and 8."""

draw_rsa_table4 = Drawing("rsa_table4", _weak_scaling)
"""Memory and throughput of weak scaling, published and ours: RSA (arXiv 2105.13120), Table 4."""
