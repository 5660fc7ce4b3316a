"""What a GPU sends for a layer of ST-DiT by number of GPUs: DSP (arXiv 2403.10266), communication table."""

from __future__ import annotations

from collections.abc import Sequence

from pandas import DataFrame

from spbench.plots.axes import GPUS, LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import video
from spbench.plots.grid import PanelGrid
from spbench.plots.sent_elements import sent_elements
from spbench.plots.series import Row, model


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model and video, smaller ones first."""
    in_order = sorted(rows, key=LENGTHS.at)
    return sent_elements(in_order, comparison, GPUS, lambda row: f"{model(row)}, {video(row)}")


draw = Drawing(__name__, _grid)
