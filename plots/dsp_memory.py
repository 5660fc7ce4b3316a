"""Peak memory of training by method, with and without recomputation: DSP (arXiv 2403.10266), memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from spbench.plots.bars import draw_rows, lost_notes
from spbench.plots.dsp_videos import video
from spbench.plots.lines import measured
from spbench.plots.panel import mark_handles, note_lines, notes_height_inches, write_notes
from spbench.plots.series import Row, gpus, title
from spbench.plots.style import PAGE_INCHES, add_legend, house_style, looks, new_figure, save, strategy_name

_PANEL_INCHES = 2.4
_PEAK = measured("peak_memory_bytes", 2**30)


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw dsp_memory.png and dsp_memory.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl.
        comparison: not used, as nothing was read off the paper's figure.
    """
    with house_style():
        return save(memory_figure(rows), output, "dsp_memory")


def memory_figure(rows: Sequence[Row]) -> Figure:
    """A panel for each model, video and number of GPUs; bars by method, without recomputation and with."""
    look = looks(row["cell"]["strategy"] for row in rows)
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(f"{row['cell']['model']}, {video(row)}, {gpus(row)} GPUs", []).append(row)
    notes = note_lines(list(_notes(panels)), PAGE_INCHES)
    heights = [_PANEL_INCHES] * len(panels) + [notes_height_inches(notes)] * bool(notes)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, "Peak memory by method"))
    if not panels:
        return figure
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for index, (name, some) in enumerate(panels.items()):
        ax = figure.add_subplot(grid[index])
        in_order = sorted(some, key=lambda row: list(look).index(row["cell"]["strategy"]))
        settings = sorted({_recomputes(row) for row in some})
        places = {_setting(on): [row for row in in_order if _recomputes(row) == on] for on in settings}
        draw_rows(ax, places, look, _PEAK, "memory")
        ax.set_ylabel("Peak memory (GiB)")
        ax.set_title(name)
    if notes:
        write_notes(figure.add_subplot(grid[len(panels)]), notes)
    handles: list[Artist] = [
        Patch(facecolor=of.color, label=strategy_name(name)) for name, of in look.items()
    ]
    add_legend(figure, [*handles, *mark_handles([row for row in rows if row["status"] != "ok"])])
    return figure


def _recomputes(row: Row) -> bool:
    return bool((row["cell"].get("model_options") or {}).get("checkpointing", False))


def _setting(recomputes: bool) -> str:
    return "blocks recomputed in backward" if recomputes else "everything kept for backward"


def _notes(panels: dict[str, list[Row]]) -> Iterator[str]:
    return lost_notes(
        (f"{name}, {strategy_name(row['cell']['strategy'])}, {_setting(_recomputes(row))}", row)
        for name, some in panels.items()
        for row in some
    )
