"""Loss curves of training runs, overlaid, and how far each is from the one device's: RSA
(arXiv 2105.13120), Figure 6, and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from pandas import DataFrame

from spbench.plots.panel import missing_notes, note_lines, notes_height_inches, write_notes
from spbench.plots.series import Row, by_model, gpus, series_of, shared, title
from spbench.plots.style import (
    INK,
    PAGE_INCHES,
    Look,
    add_legend,
    backend_name,
    house_style,
    looks,
    new_figure,
    save,
    strategy_name,
)

_CURVE_INCHES, _DEVIATION_INCHES = 2.3, 1.5
_NAMES = {
    "mlm": "Masked language modelling loss",
    "order": "Sentence-order loss",
    "language": "Next-token loss",
}

#: the curves lie on each other: the first are drawn widest, so that all can be seen
_WIDTHS = (4.5, 3.0, 1.8, 0.9)
#: and more of them than that take turns on the reference, each with dashes of so many line widths
_TURN, _TURN_WIDTH = 4.0, 2.0
_FAINTEST = 1e-9  # what is less, or nothing, is drawn here: a log axis has no zero


def draw(rows: Sequence[Row], comparison: DataFrame, output: Path) -> list[Path]:
    """Draw convergence.png and convergence.svg into the folder ``output``; returns their paths.

    Args:
        rows: result rows as in cells.jsonl, whose measurement has ``losses``.
        comparison: the table of comparison.csv; may be empty.
    """
    with house_style():
        return save(convergence_figure(rows, comparison), output, "convergence")


def convergence_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """For each model and loss the curves, and below them their deviations from the reference: the run on
    one device, in the lowest precision that there is one of."""
    models = by_model(rows)
    look = looks(row["cell"]["strategy"] for row in rows)
    notes = [note for name in models for note in _missing(name, models[name], look)]
    notes = note_lines([*notes, *_bounds(comparison)], PAGE_INCHES)
    learned = {name: [row for row in some if _losses(row)] for name, some in models.items()}
    learned = {name: some for name, some in learned.items() if some}
    heights = [_CURVE_INCHES + _DEVIATION_INCHES] * len(learned)
    heights += [notes_height_inches(notes)] * bool(notes)
    figure = new_figure(PAGE_INCHES, sum(heights), title(rows, "Losses in training"))
    if not heights:
        return figure
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    handles: list[Artist] = []
    for index, (name, some) in enumerate(learned.items()):
        losses = [loss for loss in _losses(some[0])[0] if loss != "step"]
        panels = grid[index].subgridspec(2, len(losses), height_ratios=[_CURVE_INCHES, _DEVIATION_INCHES])
        for column, loss in enumerate(losses):
            above = figure.add_subplot(panels[0, column])
            below = figure.add_subplot(panels[1, column], sharex=above)
            handles += _draw_loss(above, below, some, look, loss)
            above.set_title(f"{name}: {_NAMES.get(loss, loss)}")
            if column == 0:
                above.set_ylabel("Loss (nats)")
                below.set_ylabel(f"Deviation from one\ndevice, relative\n({_FAINTEST:g}: or less)")
    if notes:
        write_notes(figure.add_subplot(grid[len(heights) - 1]), notes)
    add_legend(figure, handles)
    return figure


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The run that the others are compared with."""
    alone = [row for row in rows if row["cell"]["strategy"] == "single" and _losses(row)]
    return min(alone, key=lambda row: _bits(row["cell"]["precision"]), default=None)


def _bits(precision: str) -> int:
    return int("".join(filter(str.isdigit, precision)))


def _draw_loss(
    above: Axes, below: Axes, rows: Sequence[Row], look: dict[str, Look], loss: str
) -> list[Artist]:
    """The curves of one loss and their deviations; returns legend entries."""
    reference = reference_of(rows)
    others = [row for row in rows if row is not reference]
    # the strategies on the reference, and on them what one device does in another precision
    others.sort(key=lambda row: row["cell"]["strategy"] == "single")
    lines = [*([reference] if reference is not None else []), *others]
    one_precision = shared(rows, "precision") is not None
    split = _by_backend(rows)
    backends = list(dict.fromkeys(_backend(row) for row in rows if _strategy(row) in split))
    palette = [str(color) for color in sns.color_palette("colorblind", max(1, len(backends))).as_hex()]
    runs = [row for row in others if _strategy(row) != "single"]
    in_turns = len(lines) > len(_WIDTHS)
    handles: list[Artist] = []
    for index, row in enumerate(lines):
        steps = [at["step"] for at in _losses(row)]
        values = [at[loss] for at in _losses(row)]
        label = _label(row, one_precision, _strategy(row) in split)
        control = row is not reference and _strategy(row) == "single"
        color = look[_strategy(row)].color
        if _strategy(row) in split:
            color = palette[backends.index(_backend(row))]
        style: dict[str, Any] = {
            "color": INK if control else color,
            "linestyle": ":" if control else "-",
            "zorder": 2 + index,
        }
        curve = style | {"linewidth": _WIDTHS[min(index, len(_WIDTHS) - 1)]}
        if in_turns and row in runs:
            turn = (_TURN * runs.index(row), (_TURN, _TURN * (len(runs) - 1)))
            curve |= {"linestyle": turn, "linewidth": _TURN_WIDTH}
        above.plot(steps, values, label=label, gid=f"{loss} {label}", **curve)
        # a whole line, also of one that takes turns
        handles.append(Line2D([], [], label=label, **style, linewidth=curve["linewidth"]))
        if reference is None or row is reference:
            continue
        there = {at["step"]: at[loss] for at in _losses(reference)}
        known = [(s, v, there[s]) for s, v in zip(steps, values, strict=True) if there.get(s)]
        gaps = [max(_FAINTEST, abs(value / other - 1)) for _, value, other in known]
        # of those that are the same number the first is widest
        width = 0.9 + (1.2 * (1 - index / len(lines)) if in_turns else 0)
        below.plot([s for s, _, _ in known], gaps, linewidth=width, gid=f"deviation {loss} {label}", **style)
    above.tick_params(labelbottom=False)
    below.set_yscale("log")
    below.set_ylim(_FAINTEST / 2, max(1e-5, 2 * below.get_ylim()[1]))
    low, high = (math.log10(limit) for limit in below.get_ylim())
    powers = range(math.ceil(low), math.floor(high) + 1)
    below.yaxis.set_major_locator(FixedLocator([10.0**n for n in powers if n % 2 == 0 or len(powers) < 6]))
    below.yaxis.set_minor_locator(NullLocator())
    for axis, (first, last) in ((above.yaxis, above.get_ylim()), (above.xaxis, above.get_xlim())):
        ticks = MaxNLocator(7).tick_values(first, last)
        axis.set_major_locator(FixedLocator([tick for tick in ticks if first <= tick <= last]))
    below.set_xlabel("Step")
    return handles


def _losses(row: Row) -> list[dict[str, float]]:
    return row["measurement"].get("losses") or [] if row["status"] == "ok" else []


def _strategy(row: Row) -> str:
    return str(row["cell"]["strategy"])


def _backend(row: Row) -> str:
    return str(row["cell"]["training"]["backend"])


def _by_backend(rows: Sequence[Row]) -> set[str]:
    """The strategies that were run with several data-parallel backends."""
    pairs = {(_strategy(row), _backend(row)) for row in rows}
    names = [strategy for strategy, _ in pairs]
    return {name for name in names if names.count(name) > 1}


def _label(row: Row, one_precision: bool, with_backend: bool) -> str:
    cell = row["cell"]
    count = f" on {gpus(row)} ranks" if gpus(row) > 1 else ""
    name = "one device" if cell["strategy"] == "single" else strategy_name(cell["strategy"])
    settings = [cell["precision"]] * (not one_precision)
    settings += [backend_name(_backend(row))] * with_backend
    return ", ".join([f"{name}{count}", *settings])


def _missing(model: str, rows: Sequence[Row], look: dict[str, Look]) -> list[str]:
    lost = [(line, [row for row in line.rows if not _losses(row)]) for line in series_of(rows, look)]
    return missing_notes(model, lost)


def _bounds(comparison: DataFrame) -> list[str]:
    """A line for each deviation that a comparison table states."""
    if comparison.empty or "quantity" not in comparison:
        return []
    found = comparison[(comparison["quantity"] == "largest_deviation") & comparison["reproduced"].notna()]
    return [
        f"{entry['claim']} {entry['reproduced']:.2g} ({entry['note']})" for entry in found.to_dict("records")
    ]
