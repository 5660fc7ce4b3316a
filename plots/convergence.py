"""Loss curves of training runs, overlaid, and how far each is from the one device's: RSA
(arXiv 2105.13120), Figure 6, and others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from pandas import DataFrame

from spbench.plots.drawing import Drawing
from spbench.plots.page import Page
from spbench.plots.panel import lost_notes
from spbench.plots.series import Row, backend, by_model, gpus, grouped, shared, strategy, title
from spbench.plots.style import INK, Look, backend_name, looks, strategy_name

_CURVE_INCHES, _DEVIATION_INCHES = 2.3, 1.5
_NAMES = {
    "mlm": "Masked language modelling loss",
    "order": "Sentence-order loss",
    "language": "Next-token loss",
}

#: widths of curves in the order of drawing: they lie on each other, and so all can be seen
_WIDTHS = (4.5, 3.0, 1.8, 0.9)
#: more curves than these widths are dashed and take turns: length of a dash in line widths, width of the line
_TURN, _TURN_WIDTH = 4.0, 2.0
_FAINTEST = 1e-9  # smaller deviations are drawn here, as a logarithmic axis has no zero


def convergence_figure(rows: Sequence[Row], comparison: DataFrame) -> Figure:
    """For each model and loss the curves, and below them their deviations from the reference: the run on
    one device, in the lowest precision that there is one of.

    Args:
        rows: whose measurement has ``losses``.
    """
    models = by_model(rows)
    look = looks(map(strategy, rows))
    notes = lost_notes(
        (f"{name}, {_label(row, False, False)}", row) for name, some in models.items() for row in some
    )
    learned = {name: [row for row in some if _losses(row)] for name, some in models.items()}
    learned = {name: some for name, some in learned.items() if some}
    page = Page(
        title(rows, "Losses in training"),
        [_CURVE_INCHES + _DEVIATION_INCHES] * len(learned),
        notes=[*notes, *_bounds(comparison)],
    )
    handles: list[Artist] = []
    for index, (name, some) in enumerate(learned.items()):
        losses = [loss for loss in _losses(some[0])[0] if loss != "step"]
        panels = page.divided(index, 2, len(losses), height_ratios=[_CURVE_INCHES, _DEVIATION_INCHES])
        for column, loss in enumerate(losses):
            above = page.figure.add_subplot(panels[0, column])
            below = page.figure.add_subplot(panels[1, column], sharex=above)
            handles += _draw_loss(above, below, some, look, loss)
            above.set_title(f"{name}: {_NAMES.get(loss, loss)}")
            if column == 0:
                above.set_ylabel("Loss (nats)")
                below.set_ylabel(f"Deviation from one\ndevice, relative\n({_FAINTEST:g}: or less)")
    return page.finish(handles)


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The run on one device with the lowest precision that has losses; None if there is none."""
    alone = [row for row in rows if row["cell"]["strategy"] == "single" and _losses(row)]
    return min(alone, key=lambda row: _bits(row["cell"]["precision"]), default=None)


def _bits(precision: str) -> int:
    return int("".join(filter(str.isdigit, precision)))


def _draw_loss(
    above: Axes, below: Axes, rows: Sequence[Row], look: dict[str, Look], loss: str
) -> list[Artist]:
    """Draw the curves of one loss and their deviations; returns legend entries."""
    reference = reference_of(rows)
    others = [row for row in rows if row is not reference]
    # the strategies above the reference, and above them one device in another precision
    others.sort(key=lambda row: strategy(row) == "single")
    lines = [*([reference] if reference is not None else []), *others]
    one_precision, split = shared(rows, "precision") is not None, _by_backend(rows)
    colors = _colors(rows, look, split)
    runs = [row for row in others if strategy(row) != "single"]
    in_turns = len(lines) > len(_WIDTHS)
    handles: list[Artist] = []
    for index, row in enumerate(lines):
        label = _label(row, one_precision, strategy(row) in split)
        control = row is not reference and strategy(row) == "single"
        style: dict[str, Any] = {
            "color": INK if control else colors[strategy(row), backend(row)],
            "linestyle": ":" if control else "-",
            "zorder": 2 + index,
        }
        curve = style | {"linewidth": _WIDTHS[min(index, len(_WIDTHS) - 1)]}
        if in_turns and row in runs:
            turn = (_TURN * runs.index(row), (_TURN, _TURN * (len(runs) - 1)))
            curve |= {"linestyle": turn, "linewidth": _TURN_WIDTH}
        # in the legend the line is whole, also of a curve that takes turns
        handles.append(Line2D([], [], label=label, **style, linewidth=curve["linewidth"]))
        losses = {at["step"]: at[loss] for at in _losses(row)}
        above.plot(list(losses), list(losses.values()), label=label, gid=f"{loss} {label}", **curve)
        if reference is None or row is reference:
            continue
        # of curves that are the same numbers the first is widest
        width = 0.9 + (1.2 * (1 - index / len(lines)) if in_turns else 0)
        gaps = _deviations(losses, {at["step"]: at[loss] for at in _losses(reference)})
        gid = f"deviation {loss} {label}"
        below.plot(list(gaps), list(gaps.values()), linewidth=width, gid=gid, **style)
    _loss_axes(above, below)
    return handles


def _colors(rows: Sequence[Row], look: dict[str, Look], split: set[str]) -> dict[tuple[str, str], str]:
    """The colour of each strategy and backend: the strategy's own, or one for each of its backends."""
    of_split = dict.fromkeys(backend(row) for row in rows if strategy(row) in split)
    # not the palette of the strategies, whose colours would name the wrong ones
    palette = dict(zip(of_split, sns.color_palette("Dark2", len(of_split)).as_hex(), strict=True))
    return {
        (of, name): str(palette[name]) if of in split else look[of].color
        for of, name in {(strategy(row), backend(row)) for row in rows}
    }


def _deviations(losses: dict[float, float], reference: dict[float, float]) -> dict[float, float]:
    """|loss / reference - 1| by step, where the reference is known and not zero; at least ``_FAINTEST``."""
    return {
        step: max(_FAINTEST, abs(value / reference[step] - 1))
        for step, value in losses.items()
        if reference.get(step)
    }


def _loss_axes(above: Axes, below: Axes) -> None:
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


def _losses(row: Row) -> list[dict[str, float]]:
    return row["measurement"].get("losses") or [] if row["status"] == "ok" else []


def _by_backend(rows: Sequence[Row]) -> set[str]:
    """The strategies that were run with several data-parallel backends."""
    return {name for name, some in grouped(rows, strategy).items() if len(set(map(backend, some))) > 1}


def _label(row: Row, one_precision: bool, with_backend: bool) -> str:
    cell = row["cell"]
    count = f" on {gpus(row)} ranks" if gpus(row) > 1 else ""
    name = "one device" if strategy(row) == "single" else strategy_name(strategy(row))
    settings = [cell["precision"]] * (not one_precision)
    settings += [backend_name(backend(row))] * with_backend
    return ", ".join([f"{name}{count}", *settings])


def _bounds(comparison: DataFrame) -> list[str]:
    """A sentence for each largest deviation in a comparison table."""
    if comparison.empty or "quantity" not in comparison:
        return []
    found = comparison[(comparison["quantity"] == "largest_deviation") & comparison["reproduced"].notna()]
    return [
        f"{entry['claim']} {entry['reproduced']:.2g} ({entry['note']})" for entry in found.to_dict("records")
    ]


draw = Drawing(__name__, convergence_figure)
