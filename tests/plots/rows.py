"""Result rows and comparison tables for figures, without running anything. Finds what was drawn by the ids of
artists, and checks figures and files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from pandas import DataFrame
from PIL import Image

from spbench.bench.cell import Cell
from spbench.plots.grid import Drawing

STRATEGY_AXIS = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def searched(
    strategy: str, ranks: int, answer: int | None, status: str = "ok", quantity: str = "seq_len", **cell: Any
) -> dict[str, Any]:
    """The row of a search; the quantity not searched for is 64."""
    given = "batch" if quantity == "seq_len" else "seq_len"
    content = {
        "model": "bert-base",
        "strategy": strategy,
        "sizes": {"dp": 1, "pp": 1, STRATEGY_AXIS[strategy]: ranks},
        given: 64,
        quantity: None,
        "cluster": "piz-daint-p100",
        "engine": "virtual",
        "precision": "fp16",
        "search": {"quantity": quantity, "step": 4},
        "variant": "first-steps",
        **cell,
    }
    return row_of(Cell.model_validate(content), {"answer": answer} if answer else {}, status)


def compared(
    claim: str, published: float, ours: float | None, numerator: str, denominator: str = "", **other: str
) -> dict[str, Any]:
    """A row of a comparison table."""
    return {
        "claim": claim,
        "published": published,
        "reproduced": ours,
        "relative_error": None if ours is None else ours / published - 1,
        "role": "predicted",
        "note": "",
        "variant": "first-steps",
        "numerator": numerator,
        "denominator": denominator,
        **other,
    }


def table(*entries: dict[str, Any]) -> pd.DataFrame:
    """A comparison table."""
    return pd.DataFrame(list(entries))


def ran(status: str = "ok", measurement: dict[str, Any] | None = None, **cell: Any) -> dict[str, Any]:
    """The row of a cell, with what was measured if it ran through."""
    return row_of(Cell.model_validate(cell), measurement or {} if status == "ok" else {}, status)


def row_of(cell: Cell, measurement: Any, status: str = "ok") -> dict[str, Any]:
    """The row of a cell, with this measurement whatever the status is."""
    reason = "" if status == "ok" else f"reason of {status}"
    of_cell = {"key": cell.key, "cell": cell.model_dump(mode="json")}
    return {**of_cell, "status": status, "reason": reason, "measurement": measurement}


def published(row: dict[str, Any], quantity: str, number: float | None, status: str = "ok") -> dict[str, Any]:
    """A row of a comparison table, of one number of a published table."""
    return {
        "claim": f"{quantity} of {row['key']}",
        "cell": row["key"],
        "strategy": row["cell"]["strategy"],
        "quantity": quantity,
        "published": number,
        "status_published": status,
    }


def drawn(draw: Drawing, rows: Any, comparison: DataFrame | None = None) -> Figure:
    """The figure of rows, in which no text lies over another."""
    figure = draw.figure(rows, DataFrame() if comparison is None else comparison)
    assert_nothing_overlaps(figure)
    return figure


def artists(figure: Figure, gid: str) -> list[Any]:
    """The artists of that id, in all panels."""
    return [artist for ax in figure.axes for artist in ax.get_children() if artist.get_gid() == gid]


def data(figure: Figure, gid: str) -> list[Any]:
    """The points of each line of that id, those of each of several, the length of each bar."""
    return [
        [points.tolist() for points in artist.get_segments()]
        if isinstance(artist, LineCollection)
        else artist.get_xydata().tolist()
        if isinstance(artist, Line2D)
        else _length(artist)
        for artist in artists(figure, gid)
    ]


def _length(bar: Any) -> float:
    """Panels of bars to the right have their levels from the top down."""
    return float(bar.get_width() if bar.axes.yaxis_inverted() else bar.get_height())


def notes(figure: Figure) -> str:
    """The sentences below the panels."""
    return "\n".join(text.get_text() for text in artists(figure, "notes"))


def labels(figure: Figure) -> list[Text]:
    """The names written beside lines."""
    return [text for text in figure.texts if str(text.get_gid()).startswith("label ")]


def legend(figure: Figure) -> list[str]:
    """The names written beside lines, then the entries of the figure's legend."""
    entries = [text for drawn in figure.legends for text in drawn.get_texts()]
    return [text.get_text() for text in [*labels(figure), *entries]]


def below_zero(mark: Line2D) -> bool:
    """Whether the mark stands in the panel, below the zero of its y axis, or of a logarithmic one below all
    lines; of bars to the right at the left."""
    ax = mark.axes
    if ax.yaxis_inverted():
        return bool(np.asarray(mark.get_xdata())[0] < 0.1)
    _, at = mark.get_transform().transform(mark.get_xydata())[0]
    _, foot = ax.transAxes.transform((0, 0))
    lines = [line.get_xydata() for line in ax.lines if str(line.get_gid()).startswith("ours ")]
    values = [y for line in lines if len(line) > 1 for _, y in line]
    _, zero = ax.transData.transform((1, min(values, default=1) if ax.get_yscale() == "log" else 0))
    return bool(foot < at < zero)


def assert_valid(paths: list[Path], folder: Path, name: str) -> None:
    """The files of a page, and of a column if it is written, are there and are what their names say."""
    names = [name, *([f"{name}_column"] if len(paths) > 3 else [])]
    assert paths == [folder / f"{of}.{form}" for of in names for form in ("png", "svg", "pdf")]
    for png, svg, pdf in zip(paths[::3], paths[1::3], paths[2::3], strict=True):
        with Image.open(png) as image:
            image.verify()
            assert image.format == "PNG"
            assert min(image.size) > 60
        assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert pdf.read_bytes().startswith(b"%PDF-")


def assert_nothing_overlaps(figure: Figure) -> None:
    """No text lies over another, and none outside the figure or smaller than 7 points."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 7
    beyond = {*_beyond_limits(figure)}
    shown = [text for text in texts if text.get_visible() and text not in beyond]
    names, boxes = [t.get_text() for t in shown], np.array([t.get_window_extent().extents for t in shown])
    low, high = boxes[:, :2], boxes[:, 2:]
    leave = ((low < -1) | (high > np.array(figure.canvas.get_width_height()) + 1)).any(axis=1)
    assert not leave.any(), f"{[names[at] for at in np.flatnonzero(leave)]} leave the figure"
    shared = np.minimum(high[:, None], high[None]) - np.maximum(low[:, None], low[None])
    # two pixels may touch: extents have margins
    over = np.argwhere(np.triu((shared >= 2).all(axis=2), k=1))
    assert not len(over), f"{[(names[a], names[b]) for a, b in over]} lie over each other"


def _beyond_limits(figure: Figure) -> Iterator[Text]:
    """The labels of ticks beyond the limits of an axis, which are not drawn."""
    for ax in figure.axes:
        for axis, limits, at in ((ax.xaxis, ax.get_xlim(), 0), (ax.yaxis, ax.get_ylim(), 1)):
            for label in (label for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)):
                if ax.axison and not min(limits) <= label.get_position()[at] <= max(limits):
                    yield label
