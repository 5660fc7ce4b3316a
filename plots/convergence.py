"""Loss curves of training runs in one panel, and their deviations from the run on one device: RSA
(arXiv 2105.13120), Figure 6, and others."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator
from pandas import DataFrame

from spbench.plots.axes import lost_notes, set_ticks, set_ticks_within
from spbench.plots.grid import Drawing, Drawn, Panel, PanelGrid
from spbench.plots.series import Row, backend, by_model, gpus, grouped, shared, strategy, title
from spbench.plots.style import (
    INK,
    backend_name,
    category_colors,
    method_color,
    model_name,
    strategy_name,
    tick_texts,
)

_CURVE_INCHES, _DEVIATION_INCHES = 1.9, 1.1
_NAMES = {
    "mlm": "Masked-token loss",
    "order": "Sentence-order loss",
    "language": "Next-token loss",
}

#: the widths of curves in the order of drawing, so that curves that lie on each other can all be seen
_WIDTHS = (4.0, 2.7, 1.6, 0.8)
#: more curves are dashed, and their dashes alternate: the length of a dash in line widths, and the line width
_TURN, _TURN_WIDTH = 4.0, 2.0
_FAINTEST = 1e-9  # smaller deviations are drawn as this one, because a logarithmic axis has no zero
_LEAST_TOP = 1e-5  # the smallest upper end of the axis of deviations
_DEVIATION = f"Deviation from one\ndevice, relative\n({tick_texts([_FAINTEST])[0]}: or less)"
_DOTS = "o^svDP"


def losses(rows: Sequence[Row], comparison: DataFrame) -> PanelGrid:
    """For each model and loss a panel of curves, and below it a panel of their deviations from the reference,
    the run on one device in the lowest precision.

    Args:
        rows: rows whose measurement has ``losses``.
    """
    models = by_model(rows)
    notes = lost_notes(
        (f"{name}, {_label(row, False, False)}", row) for name, some in models.items() for row in some
    )
    grid = PanelGrid(title(rows, "Losses in training"), [*notes, *_bounds(comparison)])
    facets = []
    for name, some in models.items():
        learned = [row for row in some if _losses(row)]
        for loss in list(_losses(learned[0])[0]) if learned else []:
            if loss != "step":
                heading, lines = f"{name}: {_NAMES.get(loss, loss)}", _styled(learned)
                curves = partial(_draw_curves, lines=lines, loss=loss)
                deviations = partial(_draw_deviations, lines=lines, loss=loss)
                upper = Panel(curves, heading, "Step", "Loss (nats)", inches=_CURVE_INCHES)
                lower = Panel(deviations, heading, "Step", _DEVIATION, inches=_DEVIATION_INCHES)
                facets.append([upper, lower])
    return grid.add(facets, abreast=2)


def reference_of(rows: Sequence[Row]) -> Row | None:
    """The row with losses that ran on one device in the lowest precision; None if there is no such row."""
    alone = [row for row in rows if row["cell"]["strategy"] == "single" and _losses(row)]
    return min(alone, key=lambda row: _bits(row["cell"]["precision"]), default=None)


def _bits(precision: str) -> int:
    return int("".join(filter(str.isdigit, precision)))


class _Styled(NamedTuple):
    """A run, with matplotlib's arguments for its curve, for a dashed curve (``turn``), and for the dots of
    its deviations (the reference has no dots)."""

    row: Row
    label: str
    curve: Mapping[str, Any]
    turn: Mapping[str, Any]
    dots: Mapping[str, Any]


def _styled(rows: Sequence[Row]) -> list[_Styled]:
    """The runs of one model in the order of drawing: the reference, the strategies, and the controls (one
    device in another precision)."""
    reference = reference_of(rows)
    one_precision, split = shared(rows, "precision") is not None, _by_backend(rows)
    of_backend = category_colors(backend(row) for row in rows if strategy(row) in split)
    runs = [row for row in rows if strategy(row) != "single"]
    controls = [row for row in rows if strategy(row) == "single" and row is not reference]
    styled = []
    for index, row in enumerate([*([reference] if reference is not None else []), *runs, *controls]):
        by_backend, control = strategy(row) in split, index > len(rows) - 1 - len(controls)
        # a strategy that was run with several backends has a colour for each backend
        color = of_backend[backend(row)] if by_backend else method_color(strategy(row))
        curve = {
            "color": INK if control else color,
            "linestyle": ":" if control else "-",
            "linewidth": _WIDTHS[min(index, len(_WIDTHS) - 1)],
            "zorder": 2 + index,
        }
        turn: dict[str, Any] = {}
        if len(rows) > len(_WIDTHS) and row in runs:
            dash = (_TURN * runs.index(row), (_TURN, _TURN * (len(runs) - 1)))
            turn = {"linestyle": dash, "linewidth": _TURN_WIDTH}
        dots: dict[str, Any] = {"marker": _DOTS[index % len(_DOTS)], "markerfacecolor": "none"}
        # dots of strategies are drawn above the control's
        dots["zorder"] = 1 if control else 2 + index
        label = _label(row, one_precision, by_backend)
        styled.append(_Styled(row, label, curve, turn, {} if row is reference else dots))
    return styled


def _draw_curves(ax: Axes, lines: Sequence[_Styled], loss: str) -> Drawn:
    """Draw the curves of one loss. They lie on each other, so wider curves are below, or dashes alternate."""
    entries = []
    for line in lines:
        look = {**line.curve, **line.turn}
        values = _curve(line.row, loss)
        ax.plot(list(values), list(values.values()), label=line.label, gid=f"{loss} {line.label}", **look)
        # the legend has solid lines, also for dashed curves
        look |= {"linestyle": line.curve["linestyle"], **line.dots}
        entries.append(Line2D([], [], markersize=4, label=line.label, **look))
    set_ticks_within(ax.yaxis, MaxNLocator(7), *ax.get_ylim())
    set_ticks_within(ax.xaxis, MaxNLocator(7), *ax.get_xlim())
    return Drawn(entries)


def _draw_deviations(ax: Axes, lines: Sequence[_Styled], loss: str) -> Drawn:
    """Draw the deviation of each curve from the reference as a dot a step, because neighbouring steps deviate
    independently."""
    reference = next((line.row for line in lines if not line.dots), None)
    highest = _LEAST_TOP
    for line in lines:
        if reference is not None and line.dots:
            gaps = _deviations(_curve(line.row, loss), _curve(reference, loss))
            highest = max([highest, *(2 * gap for gap in gaps.values())])
            style = {"color": line.curve["color"], "linestyle": "none", **line.dots}
            style |= {"markersize": 2.6, "markeredgewidth": 0.6, "gid": f"deviation {loss} {line.label}"}
            ax.plot(list(gaps), list(gaps.values()), **style)
    ax.set_yscale("log")
    ax.set_ylim(_FAINTEST / 2, highest)
    powers = range(math.ceil(math.log10(_FAINTEST)), math.floor(math.log10(highest)) + 1)
    set_ticks(ax.yaxis, [10.0**n for n in powers if n % 2 or len(powers) < 6])
    ax.yaxis.set_minor_locator(NullLocator())
    set_ticks_within(ax.xaxis, MaxNLocator(7), *ax.get_xlim())
    return Drawn()


def _deviations(losses: dict[float, float], reference: dict[float, float]) -> dict[float, float]:
    """|loss / reference - 1| by step, if the reference has a loss other than 0; at least ``_FAINTEST``."""
    return {
        step: max(_FAINTEST, abs(value / reference[step] - 1))
        for step, value in losses.items()
        if reference.get(step)
    }


def _losses(row: Row) -> list[dict[str, float]]:
    return row["measurement"].get("losses") or [] if row["status"] == "ok" else []


def _curve(row: Row, loss: str) -> dict[float, float]:
    """The values of one loss of a run, by step."""
    return {at["step"]: at[loss] for at in _losses(row)}


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
    """A note for each model and loss with the largest deviations in a comparison table."""
    if comparison.empty or "quantity" not in comparison:
        return []
    deviations = comparison[
        (comparison["quantity"] == "largest_deviation") & comparison["reproduced"].notna()
    ]
    texts: dict[str, list[str]] = {}
    for of in deviations.to_dict("records"):
        run, _, loss = str(of["claim"]).partition(": largest deviation, ")
        model, comma, run = run.rpartition(", ")
        strategy_, with_, backend_ = run.partition(" with ")
        about = f"{model_name(model)}, {_NAMES.get(loss, loss).lower()}" if comma else _NAMES.get(loss, loss)
        text = f"{strategy_}{with_}{backend_name(backend_)} {of['reproduced']:.2g}"
        texts.setdefault(about, []).append(text)
    return [f"{about}, largest deviations: {', '.join(some)}" for about, some in texts.items()]


draw = Drawing("convergence", losses)
"""Losses of training by step, a line for each strategy."""
draw_lasp_convergence = Drawing("lasp_convergence", losses)
"""Losses with LASP beside losses of one device: LASP (arXiv 2404.02882), convergence table."""
