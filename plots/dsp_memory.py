"""Peak memory of training by method, with and without recomputation: DSP (arXiv 2403.10266), memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from pandas import DataFrame

from spbench.plots.bars import draw_rows, method_patches
from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import video
from spbench.plots.grid import Drawn, Panel, PanelGrid
from spbench.plots.lines import measured
from spbench.plots.marks import lost_notes
from spbench.plots.series import Row, gpus, grouped, model, option, strategy, title
from spbench.plots.style import looks, strategy_name

_PEAK = measured("peak_memory_bytes", 2**30)


def _grid(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each model, video and number of GPUs; bars by method, without recomputation and with.

    The comparison is not used: nothing was read off the paper's figure.
    """
    facets = grouped(rows, lambda row: f"{model(row)}, {video(row)}, {gpus(row)} GPUs")
    return PanelGrid(title(rows, "Peak memory by method"), list(_notes(facets))).add(
        [[_panel(name, some)] for name, some in facets.items()], abreast=1
    )


def _panel(name: str, rows: Sequence[Row]) -> Panel:
    look = looks(map(strategy, rows))
    in_order = sorted(rows, key=lambda row: (_setting(row), list(look).index(strategy(row))))

    def draw_panel(ax: Axes) -> Drawn:
        drawn = draw_rows(ax, grouped(in_order, _setting), _PEAK, "memory")
        return replace(drawn, methods=method_patches(look))

    return Panel(draw_panel, name, y_label="Peak memory (GiB)", axis="linear")


def _setting(row: Row) -> str:
    recomputes = option(row, "model_options", "checkpointing", False)
    return "recomputed in backward" if recomputes else "kept for backward"


def _notes(panels: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    return lost_notes(
        (f"{name}, {strategy_name(strategy(row))}, {_setting(row)}", row)
        for name, some in panels.items()
        for row in some
    )


draw = Drawing(__name__, _grid)
