"""Peak memory of training by method, with and without recomputation: DSP (arXiv 2403.10266), memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.bars import draw_rows
from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import video
from spbench.plots.lines import measured
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes
from spbench.plots.series import Row, gpus, grouped, model, option, strategy, title
from spbench.plots.style import looks, strategy_name

_PANEL_INCHES = 2.4
_PEAK = measured("peak_memory_bytes", 2**30)


def _figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """A panel for each model, video and number of GPUs; bars by method, without recomputation and with.

    The comparison is not used: nothing was read off the paper's figure.
    """
    look = looks(map(strategy, rows))
    panels = grouped(rows, lambda row: f"{model(row)}, {video(row)}, {gpus(row)} GPUs")
    page = Page(
        title(rows, "Peak memory by method"), [_PANEL_INCHES] * len(panels), notes=list(_notes(panels))
    )
    for index, (name, some) in enumerate(panels.items()):
        ax = page.panel(index)
        in_order = sorted(some, key=lambda row: (_setting(row), list(look).index(strategy(row))))
        draw_rows(ax, grouped(in_order, _setting), look, _PEAK, "memory")
        ax.set_ylabel("Peak memory (GiB)")
        ax.set_title(name)
    handles = [Patch(facecolor=of.color, label=strategy_name(name)) for name, of in look.items()]
    return page.finish(handles, lost=[row for row in rows if row["status"] != "ok"])


def _setting(row: Row) -> str:
    recomputes = option(row, "model_options", "checkpointing", False)
    return "recomputed in backward" if recomputes else "kept for backward"


def _notes(panels: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    return lost_notes(
        (f"{name}, {strategy_name(strategy(row))}, {_setting(row)}", row)
        for name, some in panels.items()
        for row in some
    )


draw = Drawing(__name__, _figure)
