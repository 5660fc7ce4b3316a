"""Throughput to 128 GPUs, of one length and of one that grows with them: DSP (arXiv 2403.10266), scaling."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS, length_text
from spbench.plots.drawing import Drawing
from spbench.plots.grid import PanelGrid
from spbench.plots.lines import TOKENS_PER_SECOND, line_grid, lines_of
from spbench.plots.series import Row, by_model, gpu_counts, gpus, grouped, strategy


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """Panels of strong and of weak scaling of each model, the model that was run most widely first.

    Strong scaling is a length that was run on several numbers of GPUs, weak scaling lengths in proportion
    to these; a row may be in both. Lengths are positions of the latent video.
    """
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
    facets = {name: lines_of(some, GPUS) for name, some in several.items()}
    return line_grid(rows, facets, [TOKENS_PER_SECOND], comparison, "Throughput by number of GPUs", GPUS)


draw = Drawing(__name__, _grid)
