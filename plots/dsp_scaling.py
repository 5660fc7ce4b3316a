"""Throughput to 128 GPUs, of one length and of one that grows with them: DSP (arXiv 2403.10266), scaling."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from pandas import DataFrame

from spbench.plots.along import GPUS, LENGTHS, length_text
from spbench.plots.drawing import Drawing
from spbench.plots.line_panels import line_panels
from spbench.plots.lines import PlottedQuantity, lines_of, measured
from spbench.plots.series import Row, by_model, gpu_counts, gpus, grouped, strategy
from spbench.plots.style import looks

_THROUGHPUT = PlottedQuantity(
    "throughput_tokens_per_s", "Tokens per second", measured("tokens_per_s"), logarithmic=True
)


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """Panels of strong and of weak scaling of each model, the model that was run most widely first.

    Strong scaling is a length that was run on several numbers of GPUs, weak scaling lengths in proportion
    to these; a row may be in both. Lengths are positions of the latent video.
    """
    look = looks(map(strategy, rows))
    found: dict[str, list[Row]] = {}
    for name, some in sorted(by_model(rows).items(), key=lambda of: -len(gpu_counts(of[1]))):
        for length, strong in sorted(grouped(some, LENGTHS.at).items()):
            found[f"{name}, strong:\n{length_text(length)} positions"] = strong
        for load, weak in sorted(grouped(some, lambda row: LENGTHS.at(row) // gpus(row)).items()):
            # of strong scaling one number of GPUs has this load too; a strategy must have several lengths
            growing = {
                s for s, mine in grouped(weak, strategy).items() if len(set(map(LENGTHS.at, mine))) > 1
            }
            if growing:
                grown = [row for row in weak if strategy(row) in growing]
                found[f"{name}, weak:\n{length_text(load)} positions a GPU"] = grown
    several = {name: some for name, some in found.items() if len(gpu_counts(some)) > 1} or found
    panels = {name: list(lines_of(some, look, GPUS)) for name, some in several.items()}
    return line_panels(rows, panels, [_THROUGHPUT], comparison, "Throughput by number of GPUs", GPUS)


draw = Drawing(__name__, _figure)
