"""The figure of today's longest sequences: what each memory switch adds, machine by machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from spbench.plots.axes import set_ticks, set_ticks_within
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.lines import measured, published_of
from spbench.plots.marks import marker_line, status_mark
from spbench.plots.series import Row, gpus, grouped, option, searches_for, strategy, title
from spbench.plots.style import GREY, INK, method_color, strategy_name

_answer = measured("answer")


def ladders(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """A panel for each cluster and number of GPUs, with a bar for each row in the order of the scenario, and
    a diamond where the published length is."""
    rows = [row for row in rows if searches_for(row, "seq_len")]
    published = published_of(comparison, "tokens").numbers
    machines = grouped(rows, lambda row: (str(row["cell"]["cluster"]), gpus(row)))
    facets = [
        [
            Panel(
                partial(_draw_ladder, rows=some, published=published),
                f"{count} x {cluster}",
                "Longest sequence (million tokens)",
                inches=0.24 + 0.16 * len(some),
            )
        ]
        for (cluster, count), some in machines.items()
    ]
    lost = [row for row in rows if _answer(row) is None]
    # the switches' names leave no room for bars in a column
    grid = PanelGrid(title(rows, "The longest sequence, switch by switch"), lost=lost, page_only=True)
    return grid.add(facets, abreast=1)


def switches(row: Row) -> str:
    """What saves memory in a row, in words."""
    return " + ".join(_switches(row)) or "recomputed layers"


def _switches(row: Row) -> Iterator[str]:
    if option(row, "model_options", "loss_tile"):
        yield "tiled loss"
    if strategy(row) != "single":
        yield strategy_name(strategy(row))
    if option(row, "model_options", "mlp_tile"):
        yield "tiled MLP"
    if option(row, "model_options", "checkpoints") in ("host", "pageable"):
        yield "checkpoints on host"


def _draw_ladder(ax: Axes, rows: Sequence[Row], published: Mapping[str, float]) -> Drawn:
    before = ""
    names, reach = [], 0.0
    for y, row in enumerate(rows):
        name, answer = switches(row), _answer(row)
        # of a ladder's next rung what it adds alone
        names.append(f"... {name[len(before) :].strip()}" if before and name.startswith(before) else name)
        before = name
        theirs = published.get(row["key"])
        if answer is None:
            ax.plot([0], [y], marker="x", color=INK, gid=f"ours {row['status']} {name}")
        else:
            color = method_color(strategy(row))
            ax.barh([y], [answer / 1e6], 0.62, color=color, gid=f"ours longest {name}")
        if theirs is not None:
            ax.plot(
                [theirs / 1e6],
                [y],
                marker="D",
                markersize=4,
                color=INK,
                markerfacecolor="white",
                linestyle="",
            )
        largest = max(each / 1e6 for each in (answer or 0, theirs or 0))
        reach = max(reach, largest)
        ax.annotate(
            _length(answer),
            (largest, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK if answer else GREY,
        )
    ax.set_xlim(0, 1.25 * reach or 1)
    set_ticks_within(ax.xaxis, MaxNLocator(5), 0, reach or 1)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    set_ticks(ax.yaxis, range(len(rows)), names)
    ax.grid(axis="y", visible=False)
    marks = [status_mark("oom")] if any(_answer(row) is None for row in rows) else []
    shown = [marker_line("published", INK, "D", "white")] if published else []
    return Drawn(published=shown, marks=marks)


def _length(tokens: float | None) -> str:
    if tokens is None:
        return "none"
    return f"{tokens / 1e6:.2g}M" if tokens >= 1e6 else f"{tokens / 1e3:.0f}K"


draw_max_seqlen_today = Drawing("max_seqlen_today", ladders)
"""The longest sequence of Llama-3-8B, switch by switch: ALST (arXiv 2506.13996), its recipes."""
