"""Throughput to 128 GPUs, of one length and of one that grows with them: DSP (arXiv 2403.10266), scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS, length_text
from spbench.plots.line_panels import Quantity, line_panels, lines_of
from spbench.plots.lines import measured
from spbench.plots.series import Row, by_model, gpu_counts, gpus
from spbench.plots.style import house_style, looks, save

#: latent positions that one token of ST-DiT covers; lengths and rates of rows count positions
_A_TOKEN = 4
_THROUGHPUT = Quantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s", _A_TOKEN), logarithmic=True
)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw dsp_scaling.png and dsp_scaling.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, of several lengths and numbers of GPUs.
        comparison: the table of comparison.csv, which has what was published; may be empty.
    """
    with house_style():
        return save(scaling_figure(rows, comparison), output, "dsp_scaling")


def scaling_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """Panels of each model: its lengths that were run on several numbers of GPUs, and its lengths that grow
    with these. A row may be in both."""
    look = looks(row["cell"]["strategy"] for row in rows)
    found: dict[str, list[Row]] = {}
    # the model that was run most widely first
    for model, some in sorted(by_model(rows).items(), key=lambda of: -len(gpu_counts(of[1]))):
        for length, strong in _apart(some, _length).items():
            found[f"{model}, strong:\n{length_text(length)} tokens"] = strong
        for load, weak in _apart(some, lambda row: _length(row) // gpus(row)).items():
            # one of strong scaling's numbers of GPUs has this load too, of all strategies
            growing = [s for s in look if len({_length(r) for r in weak if r["cell"]["strategy"] == s}) > 1]
            if growing:
                grown = [row for row in weak if row["cell"]["strategy"] in growing]
                found[f"{model}, weak:\n{length_text(load)} tokens a GPU"] = grown
    several = {name: some for name, some in found.items() if len(gpu_counts(some)) > 1} or found
    panels = {name: list(lines_of(some, look, GPUS)) for name, some in several.items()}
    return line_panels(rows, panels, [_THROUGHPUT], comparison, "Throughput by number of GPUs", GPUS)


def _apart(rows: Sequence[Row], by: Callable[[Row], int]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(by(row), []).append(row)
    return dict(sorted(found.items()))


def _length(row: Row) -> int:
    return int(row["cell"]["seq_len"]) // _A_TOKEN
